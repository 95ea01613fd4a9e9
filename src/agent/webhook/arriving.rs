//! Limits of request bodies in transit, by address: one client cannot keep others out. Bytes count once they have arrived.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_LENGTH;
use axum::response::{IntoResponse as _, Response};
use bytes::BytesMut;
use futures::StreamExt as _;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Bytes of requests that have arrived in part: of all addresses, and of one. An API server has an address of its own.
const ALL_MAX: usize = 64 << 20;
const EACH_MAX: usize = ALL_MAX / 4;
/// Time that a body has.
const BODY_WITHIN: Duration = Duration::from_secs(2);

/// Requests that are arriving.
#[derive(Debug, Default)]
pub(super) struct Arriving(Mutex<Requests>);

#[derive(Debug, Default)]
struct Requests {
    next: u64,
    by_number: BTreeMap<u64, Part>,
}

/// Bytes of a request that have arrived.
#[derive(Debug)]
struct Part {
    from: IpAddr,
    bytes: usize,
    displaced: CancellationToken,
}

/// One request, until dropped.
struct Share<'a> {
    arriving: &'a Arriving,
    number: u64,
    displaced: CancellationToken,
}

impl Arriving {
    /// The body of `request`, of at most `len_max` bytes.
    ///
    /// # Errors
    /// The response, if it is too long, too slow, or if too much arrives.
    pub(super) async fn body(&self, from: SocketAddr, request: Request, len_max: usize) -> Result<Bytes, Response> {
        let share = self.begin(from.ip());
        let arrived = timeout(BODY_WITHIN, arrived(request, len_max, &share));
        match share.displaced.run_until_cancelled(arrived).await {
            Some(Ok(body)) => body,
            Some(Err(_)) => Err(StatusCode::REQUEST_TIMEOUT.into_response()),
            None => Err(too_many()),
        }
    }

    fn begin(&self, from: IpAddr) -> Share<'_> {
        let mut requests = self.lock();
        requests.next += 1;
        let (number, displaced) = (requests.next, CancellationToken::new());
        requests.by_number.insert(number, Part { from, bytes: 0, displaced: displaced.clone() });
        Share { arriving: self, number, displaced }
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Requests {
    /// Counts further `bytes` of a request. If all have too many, the oldest requests of the address with the most are displaced. False
    /// if this address has the most itself, or its share, or if the request was displaced.
    fn add(&mut self, number: u64, bytes: usize) -> bool {
        let Some(from) = self.by_number.get(&number).map(|part| part.from) else { return false };
        loop {
            let mut sums: HashMap<IpAddr, usize> = HashMap::from([(from, bytes)]);
            self.by_number.values().for_each(|part| *sums.entry(part.from).or_default() += part.bytes);
            if sums[&from] > EACH_MAX {
                return false;
            }
            if sums.values().sum::<usize>() <= ALL_MAX {
                break;
            }
            let most = sums.iter().max_by_key(|(_, sum)| **sum).filter(|(_, sum)| **sum > sums[&from]);
            let Some((most, _)) = most else { return false };
            let oldest = self.by_number.iter().find(|(_, part)| part.from == *most && part.bytes > 0);
            let Some(oldest) = oldest.map(|(number, _)| *number) else { return false };
            if let Some(part) = self.by_number.remove(&oldest) {
                part.displaced.cancel();
            }
        }
        if let Some(part) = self.by_number.get_mut(&number) {
            part.bytes += bytes;
        }
        true
    }
}

impl Share<'_> {
    fn add(&self, bytes: usize) -> bool {
        self.arriving.lock().add(self.number, bytes)
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.arriving.lock().by_number.remove(&self.number);
    }
}

async fn arrived(request: Request, len_max: usize, share: &Share<'_>) -> Result<Bytes, Response> {
    let too_long = || StatusCode::PAYLOAD_TOO_LARGE.into_response();
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: usize| length > len_max) {
        return Err(too_long());
    }
    let (mut body, mut parts) = (BytesMut::new(), request.into_body().into_data_stream());
    while let Some(part) = parts.next().await {
        let part = part.map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()).into_response())?;
        if body.len() + part.len() > len_max {
            return Err(too_long());
        }
        if !share.add(part.len()) {
            return Err(too_many());
        }
        body.extend_from_slice(&part);
    }
    Ok(body.freeze())
}

fn too_many() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "too many requests at once").into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use futures::FutureExt as _;
    use futures::stream::{once, pending};

    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn the_address_with_the_most_gives_way() {
        let arriving = Arriving::default();
        let begin = |last, bytes| {
            let share = arriving.begin(address(last));
            assert!(share.add(bytes));
            share
        };
        let gone = |share: &Share<'_>| share.displaced.is_cancelled();
        let held = [begin(1, EACH_MAX / 2), begin(1, EACH_MAX / 2)];
        assert!(!arriving.begin(address(1)).add(1), "it has its quarter");
        let others: Vec<_> = (2..5).map(|last| begin(last, EACH_MAX - 1)).collect();
        // All is taken, by few addresses: a further one displaces the oldest of the one with the most.
        let next = begin(9, 1000);
        assert!(gone(&held[0]) && !gone(&held[1]) && !others.iter().any(gone));
        assert!(!held[0].add(1), "it was displaced");
        assert!(next.add(EACH_MAX / 4) && !others.iter().any(gone), "what was displaced has made room");
        assert!(begin(8, EACH_MAX / 4).add(1) && others.iter().any(gone) && !gone(&next));
        drop((held, others, next));
        assert!(arriving.lock().by_number.is_empty());
    }

    #[tokio::test]
    async fn what_is_announced_and_does_not_arrive_keeps_nobody_out() {
        let (arriving, len_max) = (Arriving::default(), 4 << 20);
        let request = |body| Request::builder().header(CONTENT_LENGTH, len_max).body(body).unwrap();
        let from = |last| SocketAddr::from((address(last), 1));
        let silent = || {
            let first = once(async { Ok::<_, std::io::Error>(Bytes::from_static(b"{")) });
            request(Body::from_stream(first.chain(pending())))
        };
        let mut waiting: Vec<_> = (0..30).map(|n| Box::pin(arriving.body(from(n % 5), silent(), len_max))).collect();
        assert!(waiting.iter_mut().all(|body| body.now_or_never().is_none()));
        for last in [9, 0] {
            let body = arriving.body(from(last), request(Body::from(vec![b' '; len_max])), len_max).await;
            assert_eq!(body.unwrap().len(), len_max);
        }
        let long = request(Body::from(vec![b' '; len_max + 1]));
        let refused = arriving.body(from(9), long, len_max).await.unwrap_err();
        assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
