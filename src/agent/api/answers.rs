//! Memory of long answers: a client may read them slowly, or not at all.

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};

use super::error::ApiError;
use crate::agent::shares::Shares;
use crate::error::Error;
use crate::size;

/// Longest answer whose memory is not counted.
const SHORT: u64 = 64 << 10;

/// Counts the memory of a long answer to `caller`, whose client may read it slowly, until all of it is sent. Without room it is an error.
pub(super) async fn counted(response: Response, answers: &Shares, caller: &str) -> Response {
    let Some(len) = response.body().size_hint().exact().filter(|len| *len > SHORT) else { return response };
    let Some(share) = answers.try_take(caller, len) else {
        let error = Error::exhausted("too many long answers are being sent to this caller, or to others")
            .got(format!("{} more", size::show(len)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_holds_its_memory_until_its_last_byte_is_sent() {
        let answers = Shares::new(300 << 10);
        let long = || Response::new(Body::from(vec![7; 100 << 10]));
        let first = counted(long(), &answers, "a").await;
        assert_eq!(first.status(), StatusCode::OK);
        let refused = counted(long(), &answers, "a").await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "it leaves as much to others");
        assert_eq!(counted(Response::new(Body::from("short")), &answers, "a").await.status(), StatusCode::OK);
        let sent = to_bytes(first.into_body(), usize::MAX).await.unwrap();
        assert_eq!(sent.len(), 100 << 10);
        assert_eq!(counted(long(), &answers, "a").await.status(), StatusCode::SERVICE_UNAVAILABLE, "it is still held");
        drop(sent);
        assert_eq!(counted(long(), &answers, "a").await.status(), StatusCode::OK);
    }
}
