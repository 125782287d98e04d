//! What a token sees: by trials of several lengths, longer than every number in the graph that could be a window, a mask has to be
//! the causal one, with a window or without.

use std::collections::HashMap;

use super::super::Names;
use super::super::graph::Graph;
use super::super::trial::{Lengths, Trial};
use super::super::value::{Value, broadcast, broadcast_index, each_place};
use super::{Attention, Found};

/// What is added to scores that are not seen is at most this; −∞, the least number of f16, or −10,000.
pub(super) const HIDDEN: f64 = -9_999.0;
/// Numbers beyond this are no windows.
const LONGEST: f64 = (1 << 18) as f64;
/// Windows up to this are tried with a prompt that is longer.
const LONGEST_PROMPT: usize = 1000;

/// What hides keys from rows, all of it together.
#[derive(Debug, Default)]
pub(super) struct Masks(pub(super) Vec<MaskPart>);

#[derive(Clone, Debug, PartialEq)]
pub(super) enum MaskPart {
    /// Truths: what is seen; or numbers that are added to scores, 0 or [`HIDDEN`].
    Given(String),
    /// Truths: what is not seen.
    Inverted(String),
    /// A row sees no later tokens, and so many up to itself; 0: all.
    Window(usize),
}

/// The attentions with their windows; or what is wrong with the masks.
pub(super) fn with_windows(graph: &Graph, names: &Names<'_>, found: Vec<Found>) -> Result<Vec<Attention>, Vec<String>> {
    let trials = trials(graph, names, &found).map_err(|error| vec![error])?;
    let (mut attentions, mut wrong) = (Vec::new(), Vec::new());
    for Found { mut attention, masks, words } in found {
        match masks.window(&trials) {
            Ok(window) => {
                attention.window = window;
                attentions.push(attention);
            }
            Err(what) => wrong.push(format!("{words}: {what}")),
        }
    }
    if wrong.is_empty() { Ok(attentions) } else { Err(wrong) }
}

/// Trials that tell masks apart. None, if all masks are known as they are.
fn trials(graph: &Graph, names: &Names<'_>, found: &[Found]) -> Result<Vec<Trial>, String> {
    let parts = || found.iter().flat_map(|found| &found.masks.0);
    let values: Vec<&str> = parts().filter_map(MaskPart::name).collect();
    if values.is_empty() {
        return Ok(Vec::new());
    }
    let nodes = graph.needed(values.into_iter(), |_| false)?;
    let first = Trial::run(graph, names, Lengths { new: 3, past: 2 }, &HashMap::new(), None);
    let read = nodes.iter().flat_map(|&at| &graph.nodes[at].input).filter_map(|name| first.value(name));
    let constants = read.filter(|value| !value.of_past && !value.of_count).filter_map(Value::single);
    let longest = constants.map(f64::abs).filter(|&number| number <= LONGEST).fold(0.0, f64::max) as usize;
    let mut lengths =
        vec![Lengths { new: 1, past: 0 }, Lengths { new: 4, past: 5 }, Lengths { new: 3, past: longest + 3 }];
    if longest <= LONGEST_PROMPT {
        lengths.push(Lengths { new: longest + 3, past: 0 });
    }
    let run = |lengths| Trial::run(graph, names, lengths, &HashMap::new(), Some(&first));
    Ok(lengths.into_iter().map(run).collect())
}

impl MaskPart {
    fn name(&self) -> Option<&str> {
        match self {
            Self::Given(name) | Self::Inverted(name) => Some(name),
            Self::Window(_) => None,
        }
    }
}

impl Masks {
    /// The window that all parts together leave; 0: none.
    fn window(&self, trials: &[Trial]) -> Result<usize, String> {
        if let [MaskPart::Window(window)] = self.0[..] {
            return Ok(window);
        }
        if self.0.is_empty() {
            return Err("it has no mask: tokens would see later ones".into());
        }
        let mut known = None;
        // The longest past first: there a window shows.
        let mut order: Vec<&Trial> = trials.iter().collect();
        order.sort_by_key(|trial| std::cmp::Reverse(trial.lengths.past));
        for trial in order {
            let seen = self.seen(trial)?;
            let (new, past, total) = (trial.lengths.new, trial.lengths.past, trial.total());
            let last = seen[(new - 1) * total..].iter().filter(|&&seen| seen).count();
            let window = *known.get_or_insert(if last == total { 0 } else { last });
            for (row, seen) in seen.chunks(total).enumerate() {
                let at = past + row;
                let expected = |column: usize| column <= at && (window == 0 || at - column < window);
                if let Some(column) = (0..total).find(|&column| seen[column] != expected(column)) {
                    let what = if seen[column] { "sees" } else { "does not see" };
                    let names: Vec<_> = self.0.iter().filter_map(MaskPart::name).collect();
                    return Err(format!(
                        "its mask, {names:?}, is neither causal nor a window: of {total} tokens the one at {at} {what} that at {column}"
                    ));
                }
            }
        }
        known.ok_or_else(|| "its mask was not tried".into())
    }

    /// Which keys each row of a trial sees, row by row.
    fn seen(&self, trial: &Trial) -> Result<Vec<bool>, String> {
        let (new, total) = (trial.lengths.new, trial.total());
        let mut seen = vec![true; new * total];
        for part in &self.0 {
            let (name, inverted) = match part {
                MaskPart::Given(name) => (name, false),
                MaskPart::Inverted(name) => (name, true),
                MaskPart::Window(window) => {
                    for (index, seen) in seen.iter_mut().enumerate() {
                        let (at, column) = (trial.lengths.past + index / total, index % total);
                        *seen &= column <= at && (*window == 0 || at - column < *window);
                    }
                    continue;
                }
            };
            let value = trial.value(name);
            let known = value.and_then(|value| Some((value, value.dims.as_deref()?, value.numbers.as_deref()?)));
            let (value, dims, numbers) = known.ok_or_else(|| {
                format!("its mask, {name:?}, does not follow from masks and lengths by operators that are known here")
            })?;
            // One for each head would be a shape of its own.
            let full = [1, 1, new, total];
            if dims.len() > 4 || broadcast(&[dims, &full]).as_deref() != Some(&full) {
                return Err(format!("its mask, {name:?}, has the shape {dims:?} for {new} new tokens of {total}"));
            }
            let mut strange = None;
            each_place(&full, |place| {
                let number = numbers[broadcast_index(place, dims)];
                let is_seen = match value.whole {
                    true => (number != 0.0) != inverted,
                    false if number == 0.0 => true,
                    false if number <= HIDDEN => false,
                    false => {
                        strange = Some(number);
                        true
                    }
                };
                seen[place[2] * total + place[3]] &= is_seen;
            });
            if let Some(number) = strange {
                return Err(format!("its mask, {name:?}, adds {number} to a score, and not 0 or −∞"));
            }
        }
        Ok(seen)
    }
}
