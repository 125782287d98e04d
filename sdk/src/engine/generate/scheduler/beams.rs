//! The beams of a search among the sequences that run: their places in a batch, when they part, and their end.

use std::collections::BTreeMap;

use super::super::super::batching::catch_panic;
use super::super::beam::Continuation;
use super::super::plan::Precedence;
use super::super::prefixes;
use super::super::request::FinishReason;
use super::super::sequence::Sequence;
use super::super::submit::new_owner;
use super::Scheduler;
use crate::error::Result;
use crate::kv::Owner;

/// The places in a batch that are taken. A search takes as many as it may have beams as long as one of them runs: beams that wait
/// for one that has no place would wait for ever.
pub(super) struct Places {
    taken: usize,
    /// The searches of which a beam runs, and how many beams they may have.
    searches: BTreeMap<Precedence, usize>,
}

impl Places {
    pub(super) fn of<'a>(running: impl Iterator<Item = &'a Sequence>) -> Self {
        let mut places = Self { taken: 0, searches: BTreeMap::new() };
        running.for_each(|sequence| places.take(sequence));
        places
    }

    /// Whether it is a beam of a search that runs. Pages are found for it when it runs, by whatever has to leave.
    pub(super) fn has(&self, sequence: &Sequence) -> bool {
        sequence.beam.as_ref().is_some_and(|beam| self.searches.contains_key(&beam.leader))
    }

    /// How many places are taken if the sequence has one, too.
    pub(super) fn with(&self, sequence: &Sequence) -> usize {
        self.taken + if self.has(sequence) { 0 } else { sequence.places() }
    }

    pub(super) fn take(&mut self, sequence: &Sequence) {
        self.taken = self.with(sequence);
        self.searches.extend(sequence.beam.as_ref().map(|beam| (beam.leader, beam.width)));
    }

    /// The beams that wait, of searches that run.
    pub(super) fn waiting(&self, waiting: &BTreeMap<Precedence, Sequence>) -> Vec<Precedence> {
        let keys = |(&leader, &width): (&Precedence, &usize)| {
            waiting.range(leader..(leader.0, leader.1 + width as u64)).map(|(&key, _)| key)
        };
        self.searches.iter().flat_map(keys).collect()
    }
}

impl Sequence {
    /// The places in a batch that it has to have, with the beams that it may part into.
    pub(in super::super) fn places(&self) -> usize {
        self.beam.as_ref().map_or(1, |beam| beam.width)
    }
}

/// A beam that was taken out of the sequences, and whether it ran.
struct Taken {
    beam: Sequence,
    ran: bool,
}

impl Scheduler {
    /// The pages for a sequence that joins: those of all beams that it may part into, which share the prompt.
    pub(super) fn pages_to_join(&self, sequence: &Sequence) -> u64 {
        let of_prompt = (sequence.prompt / self.model.folder.kv.page_size as usize) as u64;
        let of_others = self.model.pages_of(sequence.tokens.len() + 1).saturating_sub(of_prompt);
        self.own_pages(sequence) + (sequence.places() as u64 - 1) * of_others
    }

    /// Goes on with the searches whose beams are all computed.
    pub(super) fn advance_searches(&mut self, batch: &[(Precedence, usize)]) {
        let mut ready = BTreeMap::new();
        for beam in batch.iter().filter_map(|(key, _)| self.running.get(key)?.beam.as_ref()) {
            let mut all = self.running.range(beam.keys()).chain(self.waiting.range(beam.keys()));
            if all.all(|(_, sequence)| sequence.beam.as_ref().is_some_and(|beam| beam.waits())) {
                ready.insert(beam.leader, beam.keys());
            }
        }
        for keys in ready.into_values() {
            let beams = self.take_search(keys);
            let sequences: Vec<_> = beams.iter().map(|taken| &taken.beam).collect();
            let Some(search) = sequences.first().and_then(|first| first.beam.as_ref()).map(|beam| beam.search()) else {
                continue;
            };
            let mut scratch = std::mem::take(&mut self.scratch);
            let selected = catch_panic(|| search.lock().select(&sequences, &mut scratch));
            self.scratch = scratch;
            match selected {
                Ok(going) if going.is_empty() => self.end_taken(beams, Ok(None)),
                Ok(going) => self.part(beams, &going),
                Err(error) => self.end_taken(beams, Err(error)),
            }
        }
    }

    /// Takes the beams of a search out of the sequences, in order of their ranks.
    fn take_search(&mut self, keys: std::ops::Range<Precedence>) -> Vec<Taken> {
        let mut taken = Vec::new();
        for (sequences, ran) in [(&mut self.running, true), (&mut self.waiting, false)] {
            let found: Vec<_> = sequences.range(keys.clone()).map(|(&key, _)| key).collect();
            taken.extend(found.iter().filter_map(|key| sequences.remove(key)).map(|beam| Taken { beam, ran }));
        }
        taken.sort_by_key(|taken| taken.beam.beam.as_ref().map(|beam| beam.rank));
        taken
    }

    /// Has beams go on: one with each parent's pages, the others with pages that they share with it.
    fn part(&mut self, beams: Vec<Taken>, going: &[Continuation]) {
        if let [Taken { beam, .. }] = &beams[..]
            && beam.tokens.len() == beam.prompt
        {
            self.keep_prompt(beam);
        }
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); beams.len()];
        going.iter().enumerate().for_each(|(rank, continuation)| children[continuation.parent].push(rank));
        let mut parents = Vec::new();
        // Their pages are for the others.
        for (taken, ranks) in beams.into_iter().zip(children) {
            match ranks.is_empty() {
                false => parents.push((taken, ranks)),
                true => {
                    taken.beam.beam.iter().for_each(|beam| beam.search().lock().lost(taken.beam.computed));
                    self.discard(taken.beam.owner);
                }
            }
        }
        let used: Vec<u64> = parents.iter().map(|(taken, _)| taken.beam.precedence.1).collect();
        let beam = parents.iter().find_map(|(taken, _)| taken.beam.beam.as_ref()).expect("a beam goes on");
        let (priority, first) = beam.leader;
        let mut keys = (first..first + beam.width as u64).filter(|key| !used.contains(key));
        let (mut parted, mut outcome) = (Vec::new(), Ok(()));
        let mut scratch = std::mem::take(&mut self.scratch);
        for (mut parent, ranks) in parents {
            for &rank in &ranks[1..] {
                let key = keys.next().expect("there are as many keys as beams");
                let mut beam = parent.beam.branch(new_owner(&self.model.kv), (priority, key));
                let cached = self.branch_pages(&parent.beam, beam.owner);
                let went_on = catch_panic(|| beam.go_on(going[rank], rank, &mut scratch));
                outcome = outcome.and(went_on);
                (beam.cached, beam.looked_up) = (cached, true);
                if cached + 1 < beam.tokens.len() {
                    prefixes::look_up(&self.model, &mut self.slot_sessions, &mut beam, self.share_prefixes, true);
                }
                parted.push(Taken { beam, ran: parent.ran });
            }
            let went_on = catch_panic(|| parent.beam.go_on(going[ranks[0]], ranks[0], &mut scratch));
            outcome = outcome.and(went_on);
            parted.push(parent);
        }
        self.scratch = scratch;
        parted.sort_by_key(|taken| taken.beam.beam.as_ref().map(|beam| beam.rank));
        if let Err(error) = outcome {
            return self.end_taken(parted, Err(error));
        }
        self.count_shared(&mut parted);
        for Taken { mut beam, ran } in parted {
            beam.looked_up &= ran;
            let sequences = if ran { &mut self.running } else { &mut self.waiting };
            sequences.insert(beam.precedence, beam);
        }
    }

    /// Has an owner of its own keep the pages of the prompt, for beams that have to begin anew and for other requests: the beams
    /// come and go.
    fn keep_prompt(&self, beam: &Sequence) {
        let owner = new_owner(&self.model.kv);
        let kept = self.model.kv.fork(beam.owner, owner, beam.prompt as u32).unwrap_or(0);
        if let Some(beam_of) = beam.beam.as_ref().filter(|_| kept > 0) {
            beam_of.search().lock().prompt_owner = Some(owner);
            beam.answers.set_prompt_owner(owner);
        }
    }

    /// Has a new owner share what is cached of a beam. Returns how many tokens.
    fn branch_pages(&self, from: &Sequence, to: Owner) -> usize {
        match self.model.kv.branch(from.owner, to) {
            Ok(tokens) => tokens as usize,
            // It is computed again.
            Err(error) => {
                log::debug!("owner {to} can not share the tokens of owner {}: {error}", from.owner);
                0
            }
        }
    }

    /// Counts the pages that beams share as those of the first one.
    fn count_shared(&self, beams: &mut [Taken]) {
        let page = self.model.folder.kv.page_size as usize;
        let Some((first, others)) = beams.split_first_mut() else { return };
        for Taken { beam, .. } in others {
            let both = first.beam.tokens.iter().zip(&beam.tokens);
            let equal = both.take_while(|(a, b)| a == b).count();
            beam.shared_pages = (equal.min(beam.cached) / page) as u64;
        }
        first.beam.shared_pages = 0;
    }

    /// Ends the search that a beam belongs to, which was taken out of the sequences.
    pub(super) fn end_search(&mut self, beam: Sequence, reason: Result<FinishReason>) {
        let keys = beam.beam.as_ref().expect("it is a beam").keys();
        let mut beams = self.take_search(keys);
        beams.push(Taken { beam, ran: true });
        self.end_taken(beams, reason.map(Some));
    }

    /// Ends a search: with `Ok(None)` it has found its answers.
    fn end_taken(&mut self, beams: Vec<Taken>, reason: Result<Option<FinishReason>>) {
        let sequences: Vec<_> = beams.iter().map(|taken| &taken.beam).collect();
        let Some((first, beam)) = sequences.first().and_then(|first| Some((*first, first.beam.as_ref()?))) else {
            return;
        };
        let search = beam.search();
        let computed = search.lock().computed() + sequences.iter().map(|beam| beam.computed).sum::<u64>();
        let outcome = reason.and_then(|early| catch_panic(|| search.lock().answer(&sequences, early)));
        match &outcome {
            Ok(choices) => {
                for choice in choices {
                    self.counters.ended(&Ok(choice.finish_reason), choice.tokens.len());
                }
            }
            Err(error) => self.counters.ended(&Err(error.clone()), 0),
        }
        // Other requests find the prompt with the owner that kept it, or with the only beam.
        let prompt_owner = search.lock().prompt_owner;
        prompt_owner.into_iter().filter(|_| !self.share_prefixes).for_each(|owner| self.discard(owner));
        let kept = usize::from(self.share_prefixes && prompt_owner.is_none());
        sequences.iter().skip(kept).for_each(|beam| self.discard(beam.owner));
        first.answers.deliver(first.answers.end_all(outcome, computed));
    }

    /// Removes the pages of a beam that is gone.
    fn discard(&self, owner: Owner) {
        if let Err(error) = self.model.kv.discard(owner) {
            log::warn!("the keys and values of a beam that is gone stay until they are evicted: {error}");
        }
    }
}
