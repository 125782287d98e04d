//! What is cached of a sequence before it runs: its own keys and values, or a prefix that it shares.

use super::open_model::OpenModel;
use super::sequence::Sequence;
use super::slot_sessions::SlotSessions;
use crate::kv::{KvCache, Owner, Tier};

/// Looks up what is cached of a sequence. Returns false if it is on its way from the store; with `waits` it is never false.
pub(super) fn look_up(
    model: &OpenModel,
    sessions: &mut SlotSessions,
    sequence: &mut Sequence,
    share_prefixes: bool,
    waits: bool,
) -> bool {
    let kv = &model.kv;
    (sequence.cached, sequence.shared_pages, sequence.committed) = (0, 0, false);
    if let Some(policy) = &model.policy {
        if !sessions.resume(model, policy, sequence) {
            return waits;
        }
    } else if !sequence.needs_prompt_logits() {
        let own = kv.matching(sequence.owner, sequence.cacheable()) as usize;
        let source = if own > 0 { None } else { find_source(kv, sequence, share_prefixes) };
        let from = source.map_or(sequence.owner, |(owner, _)| owner);
        if !waits && kv.lookup(&[from])[0].tier == Tier::Store && kv.prefetch(&[from]).is_ok_and(|loading| loading > 0)
        {
            return false;
        }
        sequence.cached = own;
        if let Some((owner, tokens)) = source {
            fork(kv, owner, tokens, sequence);
        }
    }
    if sequence.choice == 0 && sequence.tokens.len() == sequence.prompt {
        sequence.answers.prompt_cached(sequence.owner, sequence.cached);
    }
    true
}

/// The owner whose pages a sequence without own ones can share, and how many tokens of it.
fn find_source(kv: &KvCache, sequence: &Sequence, share_prefixes: bool) -> Option<(Owner, u32)> {
    let of_prompt = sequence.answers.prompt_owner().filter(|&owner| owner != sequence.owner);
    let shared = of_prompt.map(|owner| (owner, kv.matching(owner, sequence.cacheable())));
    let found = if share_prefixes { kv.find_prefix(sequence.cacheable()) } else { None };
    [shared, found].into_iter().flatten().filter(|(_, tokens)| *tokens > 0).max_by_key(|(_, tokens)| *tokens)
}

fn fork(kv: &KvCache, from: Owner, tokens: u32, sequence: &mut Sequence) {
    let to = sequence.owner;
    // An edited conversation of which not even the first page is of use.
    let cleared = match kv.lookup(&[to])[0].length {
        0 => Ok(false),
        _ => kv.forget(to, &mut Vec::new()),
    };
    match cleared.and_then(|_| kv.fork(from, to, tokens)) {
        Ok(shared) => {
            sequence.cached = shared as usize;
            sequence.shared_pages = u64::from(shared) / kv.page_size();
        }
        // The sequence computes it.
        Err(error) => log::debug!("owner {to} can not share {tokens} tokens of owner {from}: {error}"),
    }
}
