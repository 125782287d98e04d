//! Attention of plain operators, as torch's exporters write it: two products, and between them a scale, a cap, a mask and a softmax.

use super::super::proto::NodeProto;
use super::mask::{MaskPart, Masks};
use super::{Attention, Found, Look, Projected, codes};

/// What happens to scores between the first product and the softmax.
#[derive(Default)]
struct Scores {
    masks: Vec<MaskPart>,
    /// What scores are multiplied by, in front of the cap if there is one.
    factor: f64,
    /// 0: none.
    softcap: f64,
}

impl Look<'_> {
    /// The attention that ends with the product of weights and values of a layer.
    pub(super) fn plain(&self, product: &NodeProto, layer: usize) -> Result<Found, String> {
        let words = product.words();
        self.plain_attention(product, layer).map_err(|what| format!("{words}: {what}"))
    }

    fn plain_attention(&self, product: &NodeProto, layer: usize) -> Result<Found, String> {
        let softmax = self.softmax(product.given(0).ok_or("it has no first factor")?)?;
        let (scores, first) = self.scores(softmax.given(0).ok_or("the softmax has no input")?)?;
        let key = self.names.present_keys[layer].as_str();
        let (mut query, mut factor) = (first.given(0).ok_or("it has no query")?, scores.factor);
        while let Some((inner, by)) = self.scaled(query) {
            (query, factor) = (inner, factor * by);
        }
        let heads = match self.trial.dims(query) {
            Some(&[1, heads, _, _]) => heads,
            found => return Err(format!("the query of {} has the shape {found:?}", first.words())),
        };
        let keys = first.given(1).and_then(|name| self.value(name));
        let of_keys = keys.and_then(|keys| self.codes.factor(keys, (layer, codes::KEY), heads, true));
        let of_keys = of_keys.ok_or_else(|| {
            format!("{} does not multiply by {key:?}, or repeats its heads in another order", first.words())
        })?;
        let values = product.given(1).and_then(|name| self.value(name));
        let of_values = values.and_then(|values| self.codes.factor(values, (layer, codes::VALUE), heads, false));
        if of_values != Some(1.0) {
            return Err("its values are scaled, or their heads are repeated in another order".into());
        }
        let made = product.made(0).ok_or("its result has no name")?;
        let attention = Attention {
            projected: Projected::Apart([
                self.rows(query, heads)?,
                self.appended(key)?,
                self.appended(&self.names.present_values[layer])?,
            ]),
            heads,
            scale: (factor * of_keys) as f32,
            softcap: scores.softcap as f32,
            window: 0,
            rotary: None,
            sinks: None,
            output: self.result(made, heads),
        };
        Ok(Found { attention, masks: Masks(scores.masks), words: softmax.words() })
    }

    /// The softmax whose result this is, with 0 for what is not a number.
    fn softmax<'a>(&'a self, mut name: &'a str) -> Result<&'a NodeProto, String> {
        loop {
            let node = self.graph.maker(name).ok_or_else(|| format!("{name:?} is no result of a softmax"))?;
            let last = matches!(node.int("axis", if self.graph.opset() < 13 { 1 } else { -1 }), -1 | 3);
            name = match node.op_type.as_str() {
                "Softmax" if last => return Ok(node),
                "Cast" | "Identity" => node.given(0).unwrap_or_default(),
                "Where" if self.is_guard(node) => node.given(2).unwrap_or_default(),
                _ => return Err(format!("{} is no softmax over keys", node.words())),
            };
        }
    }

    /// Whether a node puts 0 where a softmax of nothing is not a number.
    fn is_guard(&self, node: &NodeProto) -> bool {
        let asks = node.given(0).and_then(|name| self.graph.maker(name));
        let same = asks.is_some_and(|asks| asks.is("IsNaN") && asks.given(0) == node.given(2));
        same && node.given(1).and_then(|name| self.uniform(name)) == Some(0.0)
    }

    /// What is between the scores of a softmax and the product that makes them.
    fn scores<'a>(&'a self, name: &'a str) -> Result<(Scores, &'a NodeProto), String> {
        let (mut scores, mut name) = (Scores { factor: 1.0, ..Scores::default() }, name);
        loop {
            let node = self.graph.maker(name).ok_or_else(|| format!("{name:?} is no result of a product"))?;
            if let Some((inner, by)) = self.scaled(name) {
                (name, scores.factor) = (inner, scores.factor * by);
                continue;
            }
            let inputs = (node.given(0).unwrap_or_default(), node.given(1).unwrap_or_default());
            name = match node.op_type.as_str() {
                "MatMul" => return Ok((scores, node)),
                "Cast" | "Identity" => inputs.0,
                "Tanh" if scores.softcap == 0.0 && scores.factor != 1.0 => {
                    // cap · tanh(x · f): PagedAttention has cap · tanh(x · scale / cap).
                    scores.softcap = std::mem::replace(&mut scores.factor, 1.0);
                    scores.factor *= scores.softcap;
                    inputs.0
                }
                // Behind a mask a factor would change it too; behind a cap there is no mask.
                "Add" if scores.factor == 1.0 => {
                    let (mask, inner) = self.known_of(node, inputs)?;
                    scores.masks.push(MaskPart::Given(mask.to_owned()));
                    inner
                }
                "Where" if scores.factor == 1.0 => {
                    let (seen, part) = self.masked(node)?;
                    scores.masks.push(part);
                    seen
                }
                _ => return Err(format!("{} between scores and softmax is not known here", node.words())),
            };
        }
    }

    /// Of two inputs the one whose numbers follow from masks and lengths, first.
    fn known_of<'a>(&self, node: &NodeProto, (a, b): (&'a str, &'a str)) -> Result<(&'a str, &'a str), String> {
        let known = |name: &str| self.value(name).is_some_and(|value| value.numbers.is_some());
        match (known(a), known(b)) {
            (true, false) => Ok((a, b)),
            (false, true) => Ok((b, a)),
            _ => Err(format!("what {} adds to scores does not follow from masks and lengths", node.words())),
        }
    }

    /// The scores that a choice leaves, and where it leaves them.
    fn masked<'a>(&self, node: &'a NodeProto) -> Result<(&'a str, MaskPart), String> {
        let input = |at: usize| node.given(at).unwrap_or_default();
        let hidden = |at: usize| self.uniform(input(at)).is_some_and(|number| number <= super::mask::HIDDEN);
        let (condition, yes, no) = (input(0).to_owned(), input(1), input(2));
        if hidden(2) {
            return Ok((yes, MaskPart::Given(condition)));
        }
        if hidden(1) {
            return Ok((no, MaskPart::Inverted(condition)));
        }
        Err(format!("{} puts other numbers than −∞ in place of scores", node.words()))
    }

    /// A value that is another one, multiplied by a number.
    fn scaled<'a>(&'a self, name: &'a str) -> Option<(&'a str, f64)> {
        let node = self.graph.maker(name)?;
        let (a, b) = (node.given(0)?, node.given(1)?);
        let number = |name: &str| self.value(name).and_then(|value| value.single());
        match node.op_type.as_str() {
            "Mul" => number(b).map(|by| (a, by)).or_else(|| number(a).map(|by| (b, by))),
            "Div" => number(b).map(|by| (a, 1.0 / by)),
            _ => None,
        }
    }
}
