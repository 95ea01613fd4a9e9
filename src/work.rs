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
