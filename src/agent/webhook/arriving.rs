//! Limits of request bodies in transit, by address: one client cannot keep others out.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_LENGTH;
use axum::response::{IntoResponse as _, Response};
use tokio::time::timeout;

/// Bytes that may arrive at a time: of all addresses, and of one. An API server has an address of its own.
const ALL_MAX: usize = 64 << 20;
const EACH_MAX: usize = ALL_MAX / 4;
/// Bytes that a request counts for, at least.
const REQUEST_MIN: usize = 64 << 10;
/// Time that a body has.
const BODY_WITHIN: Duration = Duration::from_secs(2);

/// Bytes that are arriving, by address.
#[derive(Debug, Default)]
pub(super) struct Arriving(Mutex<HashMap<IpAddr, usize>>);

/// Bytes of one request, until dropped.
struct Share<'a> {
    arriving: &'a Arriving,
    from: IpAddr,
    bytes: usize,
}

impl Arriving {
    /// The body of `request`, of at most `len_max` bytes.
    ///
    /// # Errors
    /// The response, if it is too long, too slow, or if too much arrives.
    pub(super) async fn body(&self, from: SocketAddr, request: Request, len_max: usize) -> Result<Bytes, Response> {
        let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length: usize = length.unwrap_or(len_max);
        if length > len_max {
            return Err(StatusCode::PAYLOAD_TOO_LARGE.into_response());
        }
        let Some(_share) = self.share(from.ip(), length.max(REQUEST_MIN)) else {
            return Err((StatusCode::SERVICE_UNAVAILABLE, "too many requests at once").into_response());
        };
        match timeout(BODY_WITHIN, to_bytes(request.into_body(), len_max)).await {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(error)) => Err((StatusCode::BAD_REQUEST, error.to_string()).into_response()),
            Err(_) => Err(StatusCode::REQUEST_TIMEOUT.into_response()),
        }
    }

    fn share(&self, from: IpAddr, bytes: usize) -> Option<Share<'_>> {
        let mut shares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = shares.get(&from).copied().unwrap_or(0);
        if own + bytes > EACH_MAX || shares.values().sum::<usize>() + bytes > ALL_MAX {
            return None;
        }
        shares.insert(from, own + bytes);
        Some(Share { arriving: self, from, bytes })
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let mut shares = self.arriving.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = shares.get_mut(&self.from) {
            *own -= self.bytes;
            if *own == 0 {
                shares.remove(&self.from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_has_a_quarter() {
        let arriving = Arriving::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let first = arriving.share(address(1), EACH_MAX);
        assert!(first.is_some() && arriving.share(address(1), 1).is_none());
        let others: Vec<_> = (2..5).map(|last| arriving.share(address(last), EACH_MAX)).collect();
        assert!(others.iter().all(Option::is_some) && arriving.share(address(9), 1).is_none());
        drop(others);
        assert!(arriving.share(address(9), EACH_MAX).is_some() && arriving.share(address(1), 1).is_none());
        drop(first);
        assert!(arriving.0.lock().unwrap().is_empty());
    }
}
