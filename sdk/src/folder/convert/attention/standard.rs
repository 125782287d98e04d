//! ONNX's own Attention (opset 23), which appends or reads past and new tokens together.

use super::super::proto::NodeProto;
use super::mask::{MaskPart, Masks};
use super::{Attention, Found, Layout, Look, Projected, Rows, codes};

const MASK: usize = 3;
const PAST: [usize; 2] = [4, 5];

impl Look<'_> {
    pub(super) fn standard(&self, node: &NodeProto, layer: usize) -> Result<Found, String> {
        let words = node.words();
        let attention = self.standard_attention(node, layer).map_err(|what| format!("{words}: {what}"))?;
        let mut masks = Vec::new();
        masks.extend(node.given(MASK).map(|mask| MaskPart::Given(mask.to_owned())));
        masks.extend((node.int("is_causal", 0) != 0).then_some(MaskPart::Window(0)));
        Ok(Found { attention, masks: Masks(masks), words })
    }

    fn standard_attention(&self, node: &NodeProto, layer: usize) -> Result<Attention, String> {
        if let Some(input) = node.input.iter().skip(PAST[1] + 1).find(|name| !name.is_empty()) {
            return Err(format!("the input {input:?} is not known here"));
        }
        if node.made(3).is_some_and(|scores| self.graph.readers(scores).next().is_some()) {
            return Err("its scores are read, which PagedAttention does not return".into());
        }
        if node.float("softcap", 0.0) != 0.0 && node.given(MASK).is_some() {
            return Err("with softcap and a mask, which runtimes apply in different orders".into());
        }
        let query = node.given(0).ok_or("it has no query")?;
        let (layout, heads) = match self.trial.dims(query) {
            Some([_, _, _]) => (Layout::Flat, node.int("q_num_heads", 0).try_into().unwrap_or(0)),
            Some(&[_, heads, _, _]) => (Layout::Heads, heads),
            found => return Err(format!("its query has the shape {found:?}")),
        };
        let query = self.rows(query, heads)?;
        let (key, value) = self.keys_and_values(node, layer, heads)?;
        let made = node.made(0).ok_or("its result has no name")?;
        let output = match layout {
            Layout::Flat => Rows { name: made.to_owned(), layout },
            Layout::Heads => self.result(made, heads),
        };
        Ok(Attention {
            projected: Projected::Apart([query, key, value]),
            heads,
            scale: node.float("scale", 0.0),
            softcap: node.float("softcap", 0.0),
            window: 0,
            rotary: None,
            sinks: None,
            output,
        })
    }

    fn keys_and_values(&self, node: &NodeProto, layer: usize, heads: usize) -> Result<(Rows, Rows), String> {
        let names = self.names;
        let kinds = [
            (codes::KEY, 1, &names.past_keys[layer], &names.present_keys[layer]),
            (codes::VALUE, 2, &names.past_values[layer], &names.present_values[layer]),
        ];
        let mut rows = Vec::new();
        for (kind, at, past, present) in kinds {
            let name = node.given(at).ok_or("it has no keys or no values")?;
            if let Some(given) = node.given(PAST[kind]) {
                if given != past {
                    return Err(format!("its past is {given:?}, and has to be {past:?}"));
                }
                if node.made(at) != Some(self.graph.origin(present)) {
                    return Err(format!("it does not make {present:?}"));
                }
                rows.push(self.rows(name, names.kv_heads)?);
                continue;
            }
            let value = self.value(name);
            let all =
                |heads| value.and_then(|value| self.codes.factor(value, (layer, kind), heads, false)) == Some(1.0);
            if !all(names.kv_heads) && !all(heads) {
                return Err(format!("{name:?} is not {present:?}, or repeats its heads in another order"));
            }
            rows.push(self.appended(present)?);
        }
        let value = rows.pop().ok_or("it has no values")?;
        Ok((rows.pop().ok_or("it has no keys")?, value))
    }
}
