//! Lines of the log that somebody else can cause: only so many in a while, and then how many were kept back.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Lines in one [`WHILE`], at most.
const LINES: u32 = 10;
/// The time that they are counted over.
const WHILE: Duration = Duration::from_mins(1);

/// The limit of one kind of line. One for the process: a static.
#[derive(Debug)]
pub(super) struct LogLimit(Mutex<Counted>);

#[derive(Debug)]
struct Counted {
    since: Option<Instant>,
    lines: u32,
    kept_back: u64,
}

impl LogLimit {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Counted { since: None, lines: 0, kept_back: 0 }))
    }

    /// Number of lines suppressed since the last one, if a line may be written now.
    pub(super) fn may(&self) -> Option<u64> {
        self.may_at(Instant::now())
    }

    fn may_at(&self, now: Instant) -> Option<u64> {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.since.is_none_or(|since| now.duration_since(since) >= WHILE) {
            (counted.since, counted.lines) = (Some(now), 0);
        }
        if counted.lines == LINES {
            counted.kept_back += 1;
            return None;
        }
        counted.lines += 1;
        Some(std::mem::take(&mut counted.kept_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lines_are_written_and_the_others_counted() {
        let (seldom, now) = (LogLimit::new(), Instant::now());
        let written = (0..100_000).filter_map(|_| seldom.may_at(now)).collect::<Vec<_>>();
        assert_eq!(written, [0; LINES as usize]);
        let later = now + WHILE;
        assert_eq!((seldom.may_at(later), seldom.may_at(later)), (Some(100_000 - u64::from(LINES)), Some(0)));
    }
}
