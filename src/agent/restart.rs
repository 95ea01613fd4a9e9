//! Restart of an agent that was killed: the system releases its locks and ports a moment after its process was told to end.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::error::{ErrorKind, Result};

/// Limit of the wait for a lock or a port that another process holds.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// Calls `take` until it succeeds, or fails with another error than a conflict; for three seconds at most. `what` names the thing.
///
/// # Errors
/// As `take`'s last call.
///
/// # Cancel safety
/// As `take`'s.
pub(super) async fn once_released<T, F>(what: &str, mut take: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut until = None;
    loop {
        let error = match take().await {
            Err(error) if error.kind() == ErrorKind::Conflict => error,
            taken => return taken,
        };
        let last = *until.get_or_insert_with(|| {
            tracing::warn!("waiting {WAIT_MAX:?} for another process to release {what}: {error}");
            Instant::now() + WAIT_MAX
        });
        if Instant::now() >= last {
            return Err(error);
        }
        sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::Error;

    #[tokio::test]
    async fn what_is_released_soon_is_taken_and_what_is_not_is_a_conflict() {
        let tries = Cell::new(0);
        let take = |result: fn(u32) -> Result<u32>| {
            tries.set(0);
            let tries = &tries;
            once_released("the port", move || {
                tries.set(tries.get() + 1);
                std::future::ready(result(tries.get()))
            })
        };
        let third = take(|number| if number < 3 { Err(Error::conflict("in use")) } else { Ok(number) });
        assert_eq!(third.await.unwrap(), 3);
        let denied = take(|_| Err(Error::new(ErrorKind::Denied, "not yours"))).await.unwrap_err();
        assert_eq!((denied.kind(), tries.get()), (ErrorKind::Denied, 1), "nothing is released there");
        let taken = take(|_| Err(Error::conflict("in use"))).await.unwrap_err();
        assert!(taken.kind() == ErrorKind::Conflict && tries.get() > 1);
    }
}
