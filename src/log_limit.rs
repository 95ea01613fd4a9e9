//! Rate limit of log lines that others can cause; the next line gives the number of suppressed ones.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of lines in one [`WHILE`].
const LINES: u32 = 10;
/// Period of the count.
const WHILE: Duration = Duration::from_mins(1);

/// Limit of one kind of line, one for the process: a static.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<Window>);

#[derive(Debug)]
struct Window {
    since: Option<Instant>,
    lines: u32,
    kept_back: u64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Window { since: None, lines: 0, kept_back: 0 }))
    }

    /// Number of lines suppressed since the last one, if a line may be written now.
    pub(crate) fn may(&self) -> Option<u64> {
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
