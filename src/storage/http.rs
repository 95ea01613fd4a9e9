//! The HTTP client for objects: one connection pool, no redirect is followed, and answers are as long as they may be.
//!
//! A redirect would take signed headers, the session token and the bytes of a PUT to any host that an answer names. An endless
//! answer would take all memory: clients read errors and lists whole.

use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextMut;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::primitives::SdkBody;
use http_body_util::{BodyExt as _, Limited};
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use url::Url;

use crate::error::{Error, ErrorKind, Result};

/// Idle connections kept to one host, and how long: beyond what one process has in flight, short of S3's own limit.
const POOL: (usize, Duration) = (128, Duration::from_secs(15));

/// Maximum bytes of an error response.
const ERROR_LEN_MAX: usize = 64 << 10;
/// Maximum bytes of a list response: 1000 keys of 1024 bytes, in XML with escapes.
const LIST_LEN_MAX: usize = 16 << 20;

/// One connection pool for all clients.
#[derive(Clone, Debug)]
pub(super) struct SharedPool(HttpClient);

impl SharedPool {
    /// Creates a pool with a `connect_timeout`. Requests themselves have no timeout here: see `Watchdog`.
    ///
    /// # Errors
    /// Other, if TLS cannot be set up.
    pub(super) fn new(connect_timeout: Duration) -> Result<Self> {
        let client = reqwest::Client::builder()
            .user_agent(concat!("towline/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            // HTTP/2 would use one TCP connection with one window, which limits the throughput; HTTP/1.1 uses many.
            .http1_only()
            .connect_timeout(connect_timeout)
            .pool_max_idle_per_host(POOL.0)
            .pool_idle_timeout(POOL.1)
            // Content lengths must be those of the objects.
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

/// A client that returns an error for a redirect, and for a response above its maximum length.
#[derive(Debug)]
struct Unredirected(reqwest::Client);

#[async_trait]
impl HttpService for Unredirected {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let asked = if is_of_object(&request) { Asked::Object } else { Asked::Other };
        let deletes = is_bulk_delete(&request);
        let is_head = request.method() == "HEAD";
        let place = url_of(&request);
        let response = HttpService::call(&self.0, request).await?;
        let status = response.status().as_u16();
        if !is_redirect(status) {
            let response = limited(response, asked);
            return match asked {
                Asked::Object => without_refusal(response, &place).await,
                Asked::Other if deletes => without_errors(response).await,
                Asked::Other if is_head && is_refusal(status) => {
                    Err(HttpError::new(HttpErrorKind::Unknown, UntoldRefusal))
                }
                Asked::Other => Ok(response),
            };
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let error = redirected(status, header("location"), header("x-amz-bucket-region"));
        // The kind Unknown is not retried.
        Err(HttpError::new(HttpErrorKind::Unknown, error))
    }
}

/// Kind of a request, by what it asks for.
#[derive(Clone, Copy, Debug)]
enum Asked {
    /// Bytes of an object, which are read as a stream, up to a limit of their own.
    Object,
    /// A list, or the outcome of a change, which are read whole.
    Other,
}

/// True for a request for bytes of an object. Lists have the query `list-type`
/// (<https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html>, also of Google's XML API) or `comp`
/// (<https://learn.microsoft.com/en-us/rest/api/storageservices/list-blobs>).
fn is_of_object(request: &HttpRequest) -> bool {
    let mut parameters = request.uri().query().unwrap_or_default().split('&');
    let lists = |parameter: &str| matches!(parameter.split('=').next(), Some("list-type" | "comp"));
    request.method() == "GET" && !parameters.any(lists)
}

/// True for a request that deletes many objects (<https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html>).
fn is_bulk_delete(request: &HttpRequest) -> bool {
    let mut parameters = request.uri().query().unwrap_or_default().split('&');
    request.method() == "POST" && parameters.any(|parameter| parameter.split('=').next() == Some("delete"))
}

/// The URL of a request without its query, which may hold secrets.
fn url_of(request: &HttpRequest) -> String {
    let uri = request.uri().to_string();
    uri.split('?').next().unwrap_or_default().to_owned()
}

/// Codes of answers with status 400 to requests that are valid later, or with other credentials
/// (<https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList>).
const PASSING_CODES: [&str; 6] = [
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestTimeout",
    "AuthorizationHeaderMalformed",
    "InvalidBucketName",
];

/// Error of a bulk delete whose answer reports errors.
#[derive(Debug, thiserror::Error)]
#[error("store did not delete all objects of a request")]
struct NotAllDeleted;

/// True if the answer of a bulk delete reported errors.
pub(super) fn is_not_all_deleted(error: &object_store::Error) -> bool {
    is_caused_by::<NotAllDeleted>(error)
}

/// True if `error` or one of its causes is an `E`.
fn is_caused_by<E: std::error::Error + 'static>(error: &object_store::Error) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |cause| cause.source()).any(<dyn std::error::Error>::is::<E>)
}

/// `response` to a bulk delete, unless it reports errors: `object_store` panics over one with another key than was sent
/// (`S3Client::bulk_delete_request`).
async fn without_errors(response: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (head, body) = response.into_parts();
    let body = body.bytes().await?;
    // Elements named `Error`, in any namespace.
    if head.status.is_success() && body.windows(6).any(|text| matches!(text, b"<Error" | b":Error")) {
        return Err(HttpError::new(HttpErrorKind::Unknown, NotAllDeleted));
    }
    Ok(HttpResponse::from_parts(head, body.into()))
}

/// Error of a request without a body in its answer, if a body would tell whether the object itself is the reason.
#[derive(Debug, thiserror::Error)]
#[error("store refuses to tell about an object")]
struct UntoldRefusal;

/// True for the refusal of a HEAD request: the answer to a GET of the same object tells its reason.
pub(super) fn is_untold_refusal(error: &object_store::Error) -> bool {
    is_caused_by::<UntoldRefusal>(error)
}

/// True if `status` may mean that the object itself is the reason that a read fails: `object_store` has no class for these.
/// All others are left to it.
const fn is_refusal(status: u16) -> bool {
    matches!(status, 400 | 410 | 416)
}

/// Code in the error of a store (<https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>), which proxies do not send.
const CODE: &str = "<Code>";

/// Beginning of the codes about keys of AWS KMS, such as that of the bucket, which may be enabled again.
const KEY_CODES: &str = "<Code>KMS.";

/// `response` to a request for bytes of an object, unless the store refuses this very object, which is damaged then.
async fn without_refusal(response: HttpResponse, place: &str) -> Result<HttpResponse, HttpError> {
    let (head, body) = response.into_parts();
    let status = head.status.as_u16();
    if !is_refusal(status) {
        return Ok(HttpResponse::from_parts(head, body));
    }
    let body = body.bytes().await?;
    let says = |code: &str| body.windows(code.len()).any(|text| text == code.as_bytes());
    let error = if status == 416 {
        Error::damaged("object is shorter than it was")
            .expected("an object with the requested range")
            .help("`towline verify` tells which names it affects")
    } else if !says(CODE) || PASSING_CODES.into_iter().any(says) {
        return Ok(HttpResponse::from_parts(head, body.into()));
    } else {
        let kind = if says(KEY_CODES) { ErrorKind::Other } else { ErrorKind::Damaged };
        Error::new(kind, "store refuses to read an object")
            .help("check how the object is stored, such as encrypted with a key that only its writer has")
    };
    let text = String::from_utf8_lossy(&body);
    let error = error.at(place).got(format!("status {status}")).source(text.into_owned());
    Err(HttpError::new(HttpErrorKind::Unknown, error))
}

/// Limits the length of `response`: an object has its announced length; errors and lists have a maximum. A longer answer tells nothing
/// about the object, which must not count as damaged.
fn limited(response: HttpResponse, asked: Asked) -> HttpResponse {
    let length = response.headers().get("content-length");
    let length = length.and_then(|value| value.to_str().ok()).and_then(|value| value.parse().ok());
    let most = match (asked, length) {
        _ if !response.status().is_success() => ERROR_LEN_MAX,
        (Asked::Object, Some(length)) => length,
        _ => LIST_LEN_MAX,
    };
    let kind = match asked {
        Asked::Other if response.status().is_success() => ErrorKind::Unsupported,
        Asked::Object | Asked::Other => ErrorKind::Unreachable,
    };
    let status = response.status();
    let too_long = move |source| {
        let error = Error::new(kind, "answer of the store is too long");
        let error = error.expected(format!("at most {most} bytes")).got(format!("more, with status {status}"));
        HttpError::new(HttpErrorKind::Unknown, error.source(source))
    };
    response.map(|body| HttpResponseBody::new(Limited::new(body, most).map_err(too_long)))
}

/// Length limit for responses that the SDK reads: errors and lists.
#[derive(Debug)]
pub(super) struct ResponseLengthLimit;

impl Intercept for ResponseLengthLimit {
    fn name(&self) -> &'static str {
        "ResponseLengthLimit"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let response = context.response_mut();
        let most = if response.status().is_success() { LIST_LEN_MAX } else { ERROR_LEN_MAX };
        let body = std::mem::replace(response.body_mut(), SdkBody::taken());
        *response.body_mut() = SdkBody::from_body_1_x(Limited::new(body, most));
        Ok(())
    }
}

/// True if `status` is a redirect to another URL; 304 is not.
pub(super) const fn is_redirect(status: u16) -> bool {
    matches!(status, 300..=303 | 305..=308)
}

/// Error for a redirect, with the headers `location` and `x-amz-bucket-region` of the response.
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

/// DNS resolver that distributes connections over all addresses of a name.
struct Spread;

impl Resolve for Spread {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let mut found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            // Each call creates a new seed.
            let order = RandomState::new();
            found.sort_by_cached_key(|address| order.hash_one(address));
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    async fn answers_end_where_they_must() {
        let answer_to = |asked: Asked, status: u16, length: Option<&str>, bytes: usize| {
            let mut response = HttpResponse::new(vec![0; bytes].into());
            *response.status_mut() = status.try_into().unwrap();
            if let Some(length) = length {
                response.headers_mut().insert("content-length", length.parse().unwrap());
            }
            limited(response, asked).into_body().bytes()
        };
        let answer = |status, length: Option<&str>, bytes| answer_to(Asked::Object, status, length, bytes);
        assert_eq!(answer(200, Some("74"), 74).await.unwrap().len(), 74);
        assert_eq!(answer(206, Some("0"), 0).await.unwrap().len(), 0);
        // A length that is contradicted by the transfer's coding.
        let error = answer(200, Some("74"), 75).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("too long: expected at most 74 bytes, got more, with status 200 OK"), "{text}");
        let kind_of = |error| Error::from(object_store::Error::Generic { store: "S3", source: Box::new(error) }).kind();
        assert_eq!(kind_of(error), ErrorKind::Unreachable);
        for status in [403, 500] {
            assert_eq!(answer(status, None, ERROR_LEN_MAX).await.unwrap().len(), ERROR_LEN_MAX);
            let long = (ERROR_LEN_MAX + 1).to_string();
            let error = answer(status, Some(&long), ERROR_LEN_MAX + 1).await.unwrap_err();
            assert_eq!(kind_of(error), ErrorKind::Unreachable, "a long page of an error is no damage");
        }
        assert_eq!(answer(200, None, LIST_LEN_MAX).await.unwrap().len(), LIST_LEN_MAX);
        assert!(answer(200, None, LIST_LEN_MAX + 1).await.is_err());
        // A list is read whole, however long it says that it is.
        let long = (LIST_LEN_MAX + 1).to_string();
        let error = answer_to(Asked::Other, 200, Some(&long), LIST_LEN_MAX + 1).await.unwrap_err();
        assert_eq!(kind_of(error), ErrorKind::Unsupported);
        assert_eq!(answer_to(Asked::Other, 200, Some("9"), 9).await.unwrap().len(), 9);
    }

    #[test]
    fn only_bytes_of_objects_may_have_any_length() {
        let of_object = |method: &str, uri: &str| {
            let mut request = HttpRequest::new(Vec::new().into());
            *request.method_mut() = method.parse().unwrap();
            *request.uri_mut() = uri.parse().unwrap();
            is_of_object(&request)
        };
        assert!(of_object("GET", "https://s3/bucket/key") && of_object("GET", "https://a/c/blob?sv=2024&sig=x"));
        for list in ["?list-type=2&prefix=a%2F", "?prefix=a&list-type=2", "?restype=container&comp=list"] {
            assert!(!of_object("GET", &format!("https://s3/bucket{list}")), "{list}");
        }
        assert!(
            !of_object("POST", "https://s3/bucket?delete") && !of_object("PUT", "https://s3/bucket/key?uploadId=1")
        );
    }

    #[tokio::test]
    async fn answers_of_bulk_deletes_are_looked_through_for_errors() {
        let reports = async |body: &str| {
            let answer = without_errors(HttpResponse::new(body.to_owned().into())).await;
            answer.err().map(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
        };
        for errors in ["<Error><Key/></Error>", "<Deleted/><s3:Error a=''>", "<Error\n>"] {
            assert!(reports(errors).await.is_some_and(|error| is_not_all_deleted(&error)), "{errors}");
        }
        for deleted in ["<Deleted><Key>Error</Key></Deleted>", "", "<E"] {
            assert!(reports(deleted).await.is_none(), "{deleted}");
        }
        let deletes = |method: &str, uri: &str| {
            let mut request = HttpRequest::new(Vec::new().into());
            *request.method_mut() = method.parse().unwrap();
            *request.uri_mut() = uri.parse().unwrap();
            is_bulk_delete(&request)
        };
        assert!(deletes("POST", "https://s3/bucket?delete") && deletes("POST", "https://s3/bucket?delete="));
        assert!(!deletes("POST", "https://s3/bucket/key?uploads") && !deletes("PUT", "https://s3/bucket/delete"));
    }

    #[tokio::test]
    async fn a_refusal_that_is_about_one_object_is_not_that_of_a_store_that_does_not_answer() {
        let kind = async |status: u16, body: &str| {
            let mut response = HttpResponse::new(body.to_owned().into());
            *response.status_mut() = status.try_into().unwrap();
            let mut request = HttpRequest::new(Vec::new().into());
            *request.uri_mut() = "https://host:9000/bucket/key?secret=1".parse().unwrap();
            let error = without_refusal(response, &url_of(&request)).await.err()?;
            let error = Error::from(object_store::Error::Generic { store: "S3", source: Box::new(error) });
            let text = error.to_string();
            assert!(
                text.contains("at https://host:9000/bucket/key: ") && text.contains(&format!("got status {status}")),
                "{text}"
            );
            assert!(error.help_text().is_some());
            Some(error.kind())
        };
        assert_eq!(kind(416, "<Code>InvalidRange</Code>").await, Some(ErrorKind::Damaged));
        assert_eq!(kind(400, "<Code>InvalidRequest</Code>").await, Some(ErrorKind::Damaged));
        assert_eq!(kind(410, "<Code>Gone</Code>").await, Some(ErrorKind::Damaged));
        assert_eq!(kind(400, "<Code>KMS.DisabledException</Code>").await, Some(ErrorKind::Other), "it may pass");
        for about_all in
            ["<Code>ExpiredToken</Code>", "<Code>AuthorizationHeaderMalformed</Code>", "<html>plain HTTP</html>", ""]
        {
            assert_eq!(kind(400, about_all).await, None, "{about_all}");
        }
        for left in [200, 206, 304, 401, 402, 403, 404, 405, 408, 409, 412, 414, 429, 431, 500, 503] {
            assert_eq!(kind(left, "text").await, None, "{left}");
        }
    }

    #[tokio::test]
    async fn names_are_looked_up() {
        let found = Spread.resolve("localhost".parse().unwrap()).await;
        assert!(found.is_ok_and(|mut found| found.any(|address| address.ip().is_loopback())));
    }
}
