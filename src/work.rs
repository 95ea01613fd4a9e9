//! Work that blocks: on threads where it may, and within the span of who asked for it.

use tokio::sync::oneshot;
use tracing::Span;

use crate::error::{Error, Result};

/// Runs `work` where it may block or compute for long.
///
/// # Errors
/// Result of `work`, run on a thread for blocking work; other, if it panicked.
///
/// # Cancel safety
/// Work that has begun goes on to its end; its result is dropped.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let span = Span::current();
    let worked = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    worked.map_err(|error| Error::other("a worker stopped").source(error))?
}

/// Runs `work`, which waits for other work, on a thread of its own called `name`. The threads of [`blocking`] are few: work that holds
/// one while it waits for another's can stop all.
///
/// # Errors
/// Result of `work`; other, if it panicked, or there is no thread.
///
/// # Cancel safety
/// Work that has begun goes on to its end; its result is dropped.
pub(crate) async fn on_own_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (span, (done, result)) = (Span::current(), oneshot::channel());
    let run = move || {
        // Nobody may be waiting any more.
        let _ = done.send(span.in_scope(work));
    };
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|source| Error::exhausted("cannot start a thread").source(source))?;
    result.await.map_err(|_| Error::other("a worker stopped"))?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_on_its_own_thread_takes_none_of_those_for_blocking_work() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let waiting: Vec<_> = (0..4)
                .map(|number| {
                    let (go_on, wait) = mpsc::channel();
                    let work = on_own_thread("waits", move || Ok((number, wait.recv().unwrap())));
                    (go_on, tokio::spawn(work))
                })
                .collect();
            tokio::task::yield_now().await;
            // They wait for this one.
            let answer = blocking(|| Ok(7)).await.unwrap();
            for (number, (go_on, work)) in waiting.into_iter().enumerate() {
                go_on.send(answer).unwrap();
                assert_eq!(work.await.unwrap().unwrap(), (number, 7));
            }
        });
    }

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let error = on_own_thread("panics", || -> Result<()> { panic!("on purpose") }).await.unwrap_err();
        assert_eq!(error.to_string(), "a worker stopped");
    }
}
