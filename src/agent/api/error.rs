//! Errors as responses, in the form in which `towline --json` prints them.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Query, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, body::Bytes};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::auth::ShownToken;
use crate::agent::redact::redact;
use crate::error::{Error, ErrorKind};

/// Limit of the body of a request, in bytes.
const BODY_LEN_MAX: usize = 1 << 20;
/// Time limit of the body of a request.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// An error, as the response to a request.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    error: Error,
}

impl ApiError {
    /// Error with a status that is more specific than its kind.
    pub(super) fn new(status: StatusCode, error: Error) -> Self {
        Self { status, error }
    }

    /// The error.
    pub(super) fn error(&self) -> &Error {
        &self.error
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Usage => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict | ErrorKind::Busy => StatusCode::CONFLICT,
            ErrorKind::Unreachable | ErrorKind::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Denied => StatusCode::FORBIDDEN,
            ErrorKind::Exhausted => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Damaged | ErrorKind::Other => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, error }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(serde_json::json!({ "error": self.error }))).into_response();
        response.extensions_mut().insert(Arc::new(self.error));
        match self.status {
            StatusCode::UNAUTHORIZED => {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // Rates are counted by the second.
            StatusCode::TOO_MANY_REQUESTS => {
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

/// `response` as another agent sees it: an error without paths and locations of this node.
pub(super) fn redacted(response: Response) -> Response {
    let Some(error) = response.extensions().get::<Arc<Error>>() else { return response };
    let mut error = serde_json::json!(**error);
    redact(&mut error);
    let (mut parts, _) = response.into_parts();
    let body = Json(serde_json::json!({ "error": error })).into_response().into_body();
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, body)
}

/// JSON body of a request, regardless of its content type.
#[derive(Debug)]
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let body = body(request, state).await?;
        let parsed = serde_json::from_slice(&body);
        parsed.map(Self).map_err(|source| {
            let help = "send a JSON object as docs/operations.md and /openapi.json describe it";
            Error::usage("request body is not valid JSON of the expected form").source(source).help(help).into()
        })
    }
}

/// Query parameters.
///
/// # Errors
/// Usage, if it is malformed or has a parameter that is not known.
pub(super) fn parse_query<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, Error> {
    let malformed = |rejection: QueryRejection| Error::usage("query is malformed").source(rejection.body_text());
    query.map(|Query(parsed)| parsed).map_err(malformed)
}

/// The body of a request, whose token still holds when all of it has arrived.
///
/// # Errors
/// The rejection, such as a wrong length.
pub(super) async fn body<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, ApiError> {
    body_within(request, state, BODY_WITHIN).await
}

/// As [`body`], within `limit`.
///
/// # Errors
/// As [`body`].
async fn body_within<S: Send + Sync>(request: Request, state: &S, limit: Duration) -> Result<Bytes, ApiError> {
    use axum::RequestExt as _;
    let token = request.extensions().get::<ShownToken>().cloned();
    let read = timeout(limit, Bytes::from_request(request.with_limited_body(), state)).await;
    let late = |_| {
        let error =
            Error::unreachable("request did not arrive in time").expected(format!("all of it within {limit:?}"));
        ApiError::new(StatusCode::REQUEST_TIMEOUT, error)
    };
    let read = read.map_err(late)?.map_err(|rejection| {
        let status = rejection.status();
        let error = Error::usage(if status == StatusCode::PAYLOAD_TOO_LARGE {
            "request is too long"
        } else {
            "cannot read the request"
        });
        ApiError::new(status, error.source(rejection.body_text()))
    })?;
    token.map_or(Ok(()), |token| token.check())?;
    Ok(read)
}

/// The limit that [`body`] needs to be set for every route.
pub(super) fn body_limit() -> axum::extract::DefaultBodyLimit {
    axum::extract::DefaultBodyLimit::max(BODY_LEN_MAX)
}

#[cfg(test)]
mod tests {
    use std::io;

    use axum::body::Body;

    use super::*;

    #[tokio::test]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let within = Duration::from_millis(1);
        let request = |body: Body| Request::new(body);
        let still = Body::from_stream(futures::stream::pending::<io::Result<Bytes>>());
        let error = body_within(request(still), &(), within).await.unwrap_err();
        assert_eq!(error.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(error.error.to_string(), "request did not arrive in time: expected all of it within 1ms");
        assert_eq!(body_within(request(Body::from("all")), &(), within).await.unwrap(), "all");
    }
}
