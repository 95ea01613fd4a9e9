//! Work that blocks: on threads where it may, and within the span of who asked for it.

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
