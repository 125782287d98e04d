//! How much a key may ask of the server in a minute.

use std::time::Instant;

use parking_lot::Mutex;

use crate::failure::Failure;
use crate::traces::Context;

const SECONDS: f64 = 60.0;

/// Who asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Which key the request has, by its place in the list; 0 where the server has none.
    pub key: usize,
    /// The span of the request, if it is traced.
    pub span: Option<Context>,
}

impl Caller {
    /// One with this key.
    pub fn with_key(key: usize) -> Self {
        Self { key, span: None }
    }
}

/// What each key has used up. A minute's worth may be used at once, and comes back evenly.
pub struct Rates {
    /// In a minute; 0: any number.
    requests: f64,
    tokens: f64,
    used: Vec<Mutex<Used>>,
}

struct Used {
    requests: f64,
    tokens: f64,
    at: Instant,
}

impl Rates {
    /// For so many keys.
    pub fn new(requests: u32, tokens: u32, keys: usize) -> Self {
        let used = || Mutex::new(Used { requests: 0.0, tokens: 0.0, at: Instant::now() });
        Self { requests: requests.into(), tokens: tokens.into(), used: (0..keys.max(1)).map(|_| used()).collect() }
    }

    /// Counts a request, or rejects it, with the time after which it may come again.
    pub fn request(&self, caller: Caller) -> Result<(), Failure> {
        self.request_at(caller, Instant::now())
    }

    fn request_at(&self, Caller { key, .. }: Caller, now: Instant) -> Result<(), Failure> {
        let Some(used) = self.used.get(key) else { return Ok(()) };
        let mut used = used.lock();
        let part = now.saturating_duration_since(used.at).as_secs_f64() / SECONDS;
        used.requests = (used.requests - part * self.requests).max(0.0);
        used.tokens = (used.tokens - part * self.tokens).max(0.0);
        used.at = now;
        // A request is known to be one more; its tokens are known when it has ended.
        for (what, limit, beyond) in [
            ("requests", self.requests, used.requests + 1.0 - self.requests),
            ("tokens", self.tokens, used.tokens - self.tokens),
        ] {
            let is_beyond = if what == "tokens" { beyond >= 0.0 } else { beyond > 1e-9 };
            if limit > 0.0 && is_beyond {
                let seconds = (beyond / limit * SECONDS).ceil().max(1.0);
                let message =
                    format!("this key may use {limit} {what} in a minute, and has: come again after {seconds} s");
                return Err(Failure { retry_after: Some(seconds as u32), ..Failure::busy(message) });
            }
        }
        used.requests += 1.0;
        Ok(())
    }

    /// Counts tokens of a prompt or of an answer.
    pub fn tokens(&self, Caller { key, .. }: Caller, count: usize) {
        if let Some(used) = self.used.get(key) {
            used.lock().tokens += count as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_key_that_asks_too_much_is_told_when_to_come_again() {
        let rates = Rates::new(3, 0, 2);
        let (begin, one, other) = (Instant::now(), Caller::with_key(0), Caller::with_key(1));
        (0..3).for_each(|_| rates.request_at(one, begin).unwrap());
        let failure = rates.request_at(one, begin).unwrap_err();
        assert_eq!((failure.status.as_u16(), failure.retry_after), (429, Some(20)));
        rates.request_at(other, begin).unwrap();
        let later = begin + Duration::from_secs(21);
        rates.request_at(one, later).unwrap();
        assert!(rates.request_at(one, later).is_err());
    }

    #[test]
    fn tokens_count_when_they_are_known() {
        let rates = Rates::new(0, 100, 1);
        let (begin, key) = (Instant::now(), Caller::with_key(0));
        rates.request_at(key, begin).unwrap();
        rates.tokens(key, 250);
        let failure = rates.request_at(key, begin).unwrap_err();
        assert_eq!(failure.retry_after, Some(90));
        assert!(failure.message.contains("100 tokens in a minute"), "{}", failure.message);
        rates.request_at(key, begin + Duration::from_secs(91)).unwrap();
    }
}
