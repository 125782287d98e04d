//! Whether a connection does anything.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The requests of a connection.
pub struct Activity {
    state: Mutex<(usize, Instant)>,
}

/// A request that is answered, until it is dropped.
pub struct Busy(Arc<Activity>);

impl Default for Activity {
    fn default() -> Self {
        Self { state: Mutex::new((0, Instant::now())) }
    }
}

impl Activity {
    /// A request has come.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.state.lock().0 += 1;
        Busy(Arc::clone(self))
    }

    /// Waits until there was no request for this time.
    pub async fn idle(&self, timeout: Duration) {
        loop {
            let (requests, since) = *self.state.lock();
            let left = if requests > 0 { timeout } else { timeout.saturating_sub(since.elapsed()) };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        *state = (state.0 - 1, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_with_a_request_is_not_idle() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let activity = Arc::new(Activity::default());
            let busy = activity.begin();
            let wait = Duration::from_millis(20);
            assert!(tokio::time::timeout(5 * wait, activity.idle(wait)).await.is_err());
            drop(busy);
            let since = Instant::now();
            activity.idle(wait).await;
            assert!(since.elapsed() >= wait);
        });
    }
}
