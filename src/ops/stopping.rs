//! Stopping an operation that writes, so that the next run can use the data that it stored.

use std::fmt::Display;

use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind, Result};
use crate::repository::Writer;
use crate::size::show;

/// Runs `work` until `stop` is cancelled, and then drops it.
///
/// # Errors
/// Cancelled, if it was stopped; else those of `work`.
///
/// # Cancel safety
/// As `work`.
pub(super) async fn unless_stopped<T>(stop: &CancellationToken, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(Error::cancelled("interrupted")),
        done = work => done,
    }
}

/// Ends the session of `what` ("the save of run/1"), which failed with `error`. Stored data is indexed for the next run; if the
/// operation was stopped, the error has its amount.
pub(super) async fn end_stopped(
    writer: &mut Writer,
    stop: &CancellationToken,
    what: impl Display,
    error: Error,
) -> Error {
    if error.kind() != ErrorKind::Cancelled || !stop.is_cancelled() {
        if let Err(left) = writer.give_up().await {
            tracing::debug!("the session is left to the collector: {left:?}");
        }
        return error;
    }
    match writer.stop().await {
        Ok(0) => Error::cancelled(format!("{what} was interrupted before anything new was stored")),
        Ok(bytes) => Error::cancelled(format!(
            "{what} was interrupted; {} of new data are stored and will be used again",
            show(bytes)
        ))
        .help("run the same again to resume; else collects free them once their grace is over"),
        Err(source) => Error::cancelled(format!("{what} was interrupted; what it stored last could not be recorded"))
            .help("run the same again: what was recorded before is used")
            .source(source),
    }
}
