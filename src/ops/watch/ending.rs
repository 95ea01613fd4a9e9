//! End of a watch.

use std::time::{Duration, Instant};

use tokio::sync::watch::Receiver;
use tokio::time::{sleep, timeout};

/// Stop request to a watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// Continue.
    #[default]
    No,
    /// Save checkpoints that are finished, or will be within this time, then end.
    Within {
        /// The time.
        grace: Duration,
        /// Wait one settling time even if nothing is being written: a trainer may save at the same signal.
        linger: bool,
    },
    /// End at once.
    Now,
}

/// Times at which the watch may and must end.
#[derive(Debug)]
pub(super) struct Ending {
    stop: Receiver<Stop>,
    settle: Duration,
    asked: Option<StopRequest>,
    announced: bool,
}

#[derive(Clone, Copy, Debug)]
struct StopRequest {
    must: Instant,
    may: Instant,
    at_once: bool,
}

impl Ending {
    pub(super) fn new(stop: Receiver<Stop>, settle: Duration) -> Self {
        let mut ending = Self { stop, settle, asked: None, announced: false };
        ending.take_in();
        ending
    }

    fn take_in(&mut self) {
        let now = Instant::now();
        let stop = *self.stop.borrow_and_update();
        let after = |wait| now.checked_add(wait).unwrap_or(now);
        self.asked = match (stop, self.asked) {
            (Stop::No, asked) => asked,
            (Stop::Now, _) => Some(StopRequest { must: now, may: now, at_once: true }),
            (Stop::Within { .. }, Some(asked)) => Some(asked),
            (Stop::Within { grace, linger }, None) => {
                let lingering = if linger { self.settle.min(grace) } else { Duration::ZERO };
                Some(StopRequest { must: after(grace), may: after(lingering), at_once: false })
            }
        };
    }

    /// True if a stop request has come since the last call.
    pub(super) fn newly_asked(&mut self) -> bool {
        self.asked.is_some() && !std::mem::replace(&mut self.announced, true)
    }

    pub(super) fn asked(&self) -> bool {
        self.asked.is_some()
    }

    /// True if it has waited long enough for a new checkpoint.
    pub(super) fn lingered(&self) -> bool {
        self.asked.is_some_and(|asked| asked.may <= Instant::now())
    }

    pub(super) fn is_over(&self) -> bool {
        self.asked.is_some_and(|asked| asked.must <= Instant::now())
    }

    /// True if it must end immediately.
    pub(super) fn at_once(&self) -> bool {
        self.asked.is_some_and(|asked| asked.at_once)
    }

    /// Waits for a stop request; after one was reported, until the watch must end.
    ///
    /// # Cancel safety
    /// Safe: a request is not lost.
    pub(super) async fn moved_on(&mut self) {
        if self.announced { self.over().await } else { self.begun().await }
    }

    /// Time left after a stop request.
    pub(super) fn left(&self) -> Duration {
        self.asked.map_or(Duration::MAX, |asked| asked.must.saturating_duration_since(Instant::now()))
    }

    /// Waits for a stop request.
    ///
    /// # Cancel safety
    /// Safe: a request is not lost.
    pub(super) async fn begun(&mut self) {
        while !self.asked() {
            self.changed_within(Duration::MAX).await;
        }
    }

    /// Waits until the watch must end.
    ///
    /// # Cancel safety
    /// Safe: a request is not lost.
    pub(super) async fn over(&mut self) {
        while !self.is_over() {
            let left = self.left();
            self.changed_within(left).await;
        }
    }

    /// Waits for `interval`, or until a new request.
    pub(super) async fn pause(&mut self, interval: Duration) {
        self.changed_within(interval.min(self.left())).await;
    }

    async fn changed_within(&mut self, wait: Duration) {
        match timeout(wait, self.stop.changed()).await {
            Ok(Ok(())) => self.take_in(),
            // The sender is gone.
            Ok(Err(_)) => sleep(wait).await,
            Err(_) => {}
        }
    }
}
