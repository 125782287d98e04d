//! com.microsoft.GroupQueryAttention, which appends, and may rotate.

use super::super::proto::{AttributeProto, NodeProto};
use super::mask::{MaskPart, Masks};
use super::{Attention, Found, Layout, Look, Projected, Rotary, Rows, Sinks};

/// The places of its inputs.
const PAST: [usize; 2] = [3, 4];
const LAST_INDEX: usize = 5;
const TOTAL: usize = 6;
const COS_SIN: [usize; 2] = [7, 8];
const POSITIONS: usize = 9;
const BIAS: usize = 10;
const SINKS: usize = 11;

const KNOWN: [&str; 9] = [
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    // How past tensors are kept: pages have all tokens.
    "sliding_window_cache",
    "do_rotary",
    "rotary_interleaved",
    "smooth_softmax",
];

impl Look<'_> {
    pub(super) fn group_query(&self, node: &NodeProto, layer: usize) -> Result<Found, String> {
        let words = node.words();
        let wrong = |what: String| format!("{words}: {what}");
        if let Some(attribute) = node.attribute.iter().find(|it| !KNOWN.contains(&it.name.as_str()) && !is_nothing(it))
        {
            return Err(wrong(format!("the attribute {:?} is not known here", attribute.name)));
        }
        if node.given(BIAS).is_some() {
            return Err(wrong(
                "it adds a bias to scores (attention_bias), which PagedAttention has no input for".into(),
            ));
        }
        if let Some(input) = node.input.iter().skip(SINKS + 1).find(|name| !name.is_empty()) {
            return Err(wrong(format!("the input {input:?} is not known here")));
        }
        self.appends(node, layer).map_err(wrong)?;
        let wrong = |what: String| format!("{words}: {what}");
        let heads = usize::try_from(node.int("num_heads", 0)).unwrap_or(0);
        let kv_heads = node.int("kv_num_heads", 0);
        if usize::try_from(kv_heads) != Ok(self.names.kv_heads) {
            let known = self.names.kv_heads;
            return Err(wrong(format!("kv_num_heads is {kv_heads}, and the past of the layer has {known} heads")));
        }
        let projected = self.projected(node, heads).map_err(wrong)?;
        let wrong = |what: String| format!("{words}: {what}");
        let window = node.int("local_window_size", -1).max(0) as usize;
        let output = node.made(0).ok_or_else(|| wrong("its result has no name".into()))?;
        let rotary = self.rotary(node).map_err(wrong)?;
        let sinks = match node.given(SINKS) {
            Some(sinks) => Some(Sinks::Given(sinks.to_owned())),
            None => (node.int("smooth_softmax", 0) == 1).then_some(Sinks::Zero),
        };
        let attention = Attention {
            projected,
            heads,
            scale: node.float("scale", 0.0),
            softcap: node.float("softcap", 0.0),
            window,
            rotary,
            sinks,
            output: Rows { name: output.to_owned(), layout: Layout::Flat },
        };
        Ok(Found { attention, masks: Masks(vec![MaskPart::Window(window)]), words })
    }

    /// Checks that it appends to the past of its layer, and that its lengths are those of the sequence.
    fn appends(&self, node: &NodeProto, layer: usize) -> Result<(), String> {
        let names = self.names;
        let own = [&names.past_keys[layer], &names.past_values[layer]];
        for (at, past) in PAST.into_iter().zip(own) {
            if node.given(at) != Some(past) {
                return Err(format!("its past is {:?}, and has to be {past:?}", node.given(at).unwrap_or("")));
            }
        }
        let present = [&names.present_keys[layer], &names.present_values[layer]];
        for (at, present) in [1, 2].into_iter().zip(present) {
            if node.made(at) != Some(self.graph.origin(present)) {
                return Err(format!("it does not make {present:?}"));
            }
        }
        let total = self.trial.total() as f64;
        for (at, expected, what) in [(LAST_INDEX, total - 1.0, "seqlens_k"), (TOTAL, total, "total_sequence_length")] {
            let found = node.given(at).and_then(|name| self.uniform(name));
            if found != Some(expected) {
                let name = node.given(at).unwrap_or("");
                return Err(format!(
                    "{what}, {name:?}, does not follow from the sum or the width of the attention mask"
                ));
            }
        }
        Ok(())
    }

    fn projected(&self, node: &NodeProto, heads: usize) -> Result<Projected, String> {
        let query = node.given(0).ok_or("it has no query")?;
        let (Some(key), Some(value)) = (node.given(1), node.given(2)) else {
            let packed = self.rows(query, heads + 2 * self.names.kv_heads)?;
            return Ok(Projected::Packed(packed.name));
        };
        let kv_heads = self.names.kv_heads;
        Ok(Projected::Apart([self.rows(query, heads)?, self.rows(key, kv_heads)?, self.rows(value, kv_heads)?]))
    }

    fn rotary(&self, node: &NodeProto) -> Result<Option<Rotary>, String> {
        if node.int("do_rotary", 0) == 0 {
            return Ok(None);
        }
        if let Some(positions) = node.given(POSITIONS).filter(|name| !self.trial.are_positions(name)) {
            return Err(format!("its positions, {positions:?}, are not those of the tokens"));
        }
        let table = |at: usize| {
            let name = node.given(at).ok_or("it rotates, and has no cos_cache or sin_cache")?;
            match self.trial.dims(name) {
                Some(&[_, pairs]) if (1..=self.names.head_size / 2).contains(&pairs) => Ok((name.to_owned(), pairs)),
                found => Err(format!("the table of its rotation, {name:?}, has the shape {found:?}")),
            }
        };
        let [(cos, pairs), (sin, _)] = [table(COS_SIN[0])?, table(COS_SIN[1])?];
        Ok(Some(Rotary { cos, sin, pairs, interleaved: node.int("rotary_interleaved", 0) != 0 }))
    }
}

/// Whether an attribute that is not known changes nothing.
fn is_nothing(attribute: &AttributeProto) -> bool {
    let text = attribute.s.as_deref().unwrap_or_default();
    let numbers = attribute.i.unwrap_or(0) == 0 && attribute.f.unwrap_or(0.0) == 0.0;
    numbers && matches!(text, b"" | b"NONE") && attribute.ints.is_empty() && attribute.floats.is_empty()
}
