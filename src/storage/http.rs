//! The HTTP client for objects: one connection pool, and no redirect is followed.
//!
//! A redirect would take signed headers, the session token and the bytes of a PUT to any host that an answer names.

use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use url::Url;

use crate::error::{Error, Result};

/// Idle connections kept to one host, and how long: beyond what one process has in flight, short of S3's own limit.
const POOL: (usize, Duration) = (128, Duration::from_secs(15));

/// One connection pool, whichever client asks.
#[derive(Clone, Debug)]
pub(super) struct SharedPool(HttpClient);

impl SharedPool {
    /// A pool whose connections are made within `connect_timeout`. Requests themselves may take any time: see `Watchdog`.
    ///
    /// # Errors
    /// Other, if TLS cannot be set up.
    pub(super) fn new(connect_timeout: Duration) -> Result<Self> {
        let client = reqwest::Client::builder()
            .user_agent(concat!("towline/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            // One HTTP/2 connection is one TCP flow and one window: it caps throughput where many HTTP/1.1 ones do not.
            .http1_only()
            .connect_timeout(connect_timeout)
            .pool_max_idle_per_host(POOL.0)
            .pool_idle_timeout(POOL.1)
            // Lengths are those of the objects.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .dns_resolver(Arc::new(Spread))
            .build()
            .map_err(|source| Error::other("cannot set up the HTTP client").source(source))?;
        Ok(Self(HttpClient::new(Unredirected(client))))
    }
}

impl HttpConnector for SharedPool {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}

/// A client that makes an error of a redirect.
#[derive(Debug)]
struct Unredirected(reqwest::Client);

#[async_trait]
impl HttpService for Unredirected {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = HttpService::call(&self.0, request).await?;
        let status = response.status().as_u16();
        if !is_redirect(status) {
            return Ok(response);
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let error = redirected(status, header("location"), header("x-amz-bucket-region"));
        // Unknown: it is not tried again.
        Err(HttpError::new(HttpErrorKind::Unknown, error))
    }
}

/// Whether an answer with `status` sends the client elsewhere; 304 does not.
pub(super) const fn is_redirect(status: u16) -> bool {
    matches!(status, 300..=303 | 305..=308)
}

/// The error for an answer that sends the client elsewhere, with the headers `location` and `x-amz-bucket-region` of the answer.
pub(super) fn redirected(status: u16, location: Option<&str>, region: Option<&str>) -> Error {
    // Paths and queries may hold secrets.
    let host = location.and_then(|location| Url::parse(location).ok()).map(|url| url.origin().ascii_serialization());
    let mut got = format!("status {status}");
    for (word, value) in [("to", host.as_deref()), ("region", region)] {
        if let Some(value) = value {
            got = format!("{got}, {word} {value}");
        }
    }
    Error::usage("bucket lies elsewhere: the store redirects requests, which is not followed")
        .got(got)
        .help("set the endpoint (--endpoint, AWS_ENDPOINT_URL) or the region (AWS_REGION) to where the bucket lies")
}

/// Looks names up, and spreads connections over all addresses of a name.
struct Spread;

impl Resolve for Spread {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let mut found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            // Seeded anew by each call.
            let order = RandomState::new();
            found.sort_by_cached_key(|address| order.hash_one(address));
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_redirect_names_host_and_region_and_nothing_secret() {
        let location = "https://b.s3.eu-west-1.amazonaws.com/key?X-Amz-Signature=hush";
        let error = redirected(307, Some(location), Some("eu-west-1"));
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.to_string();
        assert!(text.contains("307, to https://b.s3.eu-west-1.amazonaws.com, region eu-west-1"), "{text}");
        assert!(!format!("{error:?}").contains("hush"), "{error:?}");
        assert!(redirected(301, Some("not a URL"), None).to_string().ends_with("status 301"));
        assert!(is_redirect(301) && is_redirect(308) && !is_redirect(304) && !is_redirect(200));
    }

    #[tokio::test]
    async fn names_are_looked_up() {
        let found = Spread.resolve("localhost".parse().unwrap()).await;
        assert!(found.is_ok_and(|mut found| found.any(|address| address.ip().is_loopback())));
    }
}
