//! Memory of long answers: a client may read them slowly, or not at all.

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};

use super::error::ApiError;
use crate::agent::shares::Shares;
use crate::error::Error;

/// Longest answer whose memory is not counted.
const SHORT: u64 = 64 << 10;

/// Counts the memory of a long answer to `caller`, whose client may read it slowly, until all of it is sent. Without room it is an error.
pub(super) async fn counted(response: Response, answers: &Shares, caller: &str) -> Response {
    let Some(len) = response.body().size_hint().exact().filter(|len| *len > SHORT) else { return response };
    let Some(share) = answers.try_take(caller, len) else {
        let error = Error::exhausted("too many long answers are being sent to this caller, or to others")
            .help("read them one after the other, or ask for less: `prefix`, `limit`");
        return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error).into_response();
    };
    let (head, body) = response.into_parts();
    // It is in memory.
    match to_bytes(body, usize::MAX).await {
        Ok(bytes) => Response::from_parts(head, Body::from(share.of(bytes))),
        Err(error) => ApiError::from(Error::other("answer was cut off").source(error)).into_response(),
    }
}
