//! Opening a bucket: endpoint, region and credentials as every AWS tool finds them, then the clients.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::Credentials;
use aws_credential_types::credential_feature::AwsCredentialFeature;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{RequestChecksumCalculation, ResponseChecksumValidation};
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::client::ClientOptions;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};
use url::{Host, Url};

use super::bucket::Bucket;
use super::credentials::ChainCredentials;
use super::http::SharedPool;
use super::routed::Routed;
use super::store::StoreOptions;
use crate::error::{Error, Result};

/// A TCP and TLS handshake is given this long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Keys given by the caller instead of found by the chain.
#[derive(Clone)]
pub struct Keys {
    /// `AWS_ACCESS_KEY_ID`
    pub access_key_id: String,
    /// `AWS_SECRET_ACCESS_KEY`
    pub secret_access_key: String,
    /// `AWS_SESSION_TOKEN`
    pub session_token: Option<String>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("access_key_id", &self.access_key_id).finish_non_exhaustive()
    }
}

/// The objects below `prefix` of `bucket`, and the bucket itself; nothing is asked of it yet.
pub(super) async fn connect(
    bucket: &str,
    prefix: &str,
    options: &StoreOptions,
) -> Result<(Arc<dyn ObjectStore>, Bucket)> {
    let config = load(options).await;
    let endpoint = endpoint(options, &config);
    if let Some(endpoint) = &endpoint {
        check_endpoint(endpoint, options.allow_http)?;
    }
    let provider = config
        .credentials_provider()
        .ok_or_else(|| Error::denied("no credentials for the store").help("set AWS_PROFILE or AWS_ACCESS_KEY_ID"))?;
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    let credentials = Arc::new(ChainCredentials::new(provider, profile));
    let region = config.region().map_or_else(|| "us-east-1".to_owned(), ToString::to_string);

    let mut sdk = aws_sdk_s3::config::Builder::from(&config).region(Region::new(region.clone()));
    if let Some(endpoint) = &endpoint {
        sdk = sdk.endpoint_url(endpoint).force_path_style(true);
    }
    let client = aws_sdk_s3::Client::from_conf(sdk.build());
    let reached = Bucket::new(client, bucket, prefix, region, endpoint, Arc::clone(&credentials));
    Ok((objects(&reached, &credentials)?, reached))
}

async fn load(options: &StoreOptions) -> SdkConfig {
    let given = options.region.clone().map(Region::new);
    let region = RegionProviderChain::first_try(given).or_else(EnvironmentVariableRegionProvider::new());
    let region = region.or_else(ProfileFileRegionProvider::new());
    // Off AWS nobody answers at the instance metadata address, and asking costs seconds.
    let region = if named_endpoint(options).is_some() {
        region
    } else {
        region.or_else(aws_config::imds::region::ImdsRegionProvider::builder().build())
    };
    let timeouts =
        TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).operation_attempt_timeout(options.stall).build();
    let loader = aws_config::defaults(BehaviorVersion::latest())
        .region(region)
        .timeout_config(timeouts)
        // Ceph RGW refuses trailing checksums (XAmzContentSHA256Mismatch): send none unless an operation demands one.
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    let loader = match &options.keys {
        Some(keys) => loader.credentials_provider(given_credentials(keys)),
        None => loader,
    };
    loader.load().await
}

fn given_credentials(keys: &Keys) -> Credentials {
    let Keys { access_key_id, secret_access_key, session_token } = keys.clone();
    let mut given = Credentials::new(access_key_id, secret_access_key, session_token, None, "given");
    given.get_property_mut_or_default::<Vec<AwsCredentialFeature>>().push(AwsCredentialFeature::CredentialsCode);
    given
}

/// An endpoint named by the caller or the environment.
fn named_endpoint(options: &StoreOptions) -> Option<String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    options.endpoint.clone().or_else(|| variable("AWS_ENDPOINT_URL_S3")).or_else(|| variable("AWS_ENDPOINT_URL"))
}

/// Endpoint if it is not that of AWS, without a trailing slash.
fn endpoint(options: &StoreOptions, config: &SdkConfig) -> Option<String> {
    let found = named_endpoint(options).or_else(|| config.endpoint_url().map(str::to_owned))?;
    Some(found.trim_end_matches('/').to_owned())
}

/// Refuses an endpoint that is not a plain http or https URL, and one that would send bytes in clear over a network unless that is
/// asked for by name.
fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<()> {
    let url = parse_endpoint(endpoint)?;
    if url.scheme() == "https" || allow_http || is_loopback(&url) {
        return Ok(());
    }
    Err(Error::denied("endpoint would send data and names in clear over the network")
        .at(endpoint)
        .help("use https, or say --allow-http if that network is trusted"))
}

/// The URL of an endpoint: the host that is checked must be the host that is connected to, so it is parsed as the clients parse it, and
/// user information, which hides the host from a reader, is refused.
fn parse_endpoint(endpoint: &str) -> Result<Url> {
    let malformed = |what: &'static str| Error::usage(what).at(endpoint).help("write https://HOST[:PORT]");
    // A URL parser drops or rewrites these, another one may not.
    if endpoint.bytes().any(|byte| !byte.is_ascii_graphic() || byte == b'\\') {
        return Err(malformed("endpoint is not a URL"));
    }
    let url = Url::parse(endpoint).map_err(|source| malformed("endpoint is not a URL").source(source))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(malformed("endpoint is not an http or https URL"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        // It may be a secret.
        return Err(Error::usage("endpoint has user information before its host")
            .at(url.host_str().unwrap_or_default())
            .help("write https://HOST[:PORT]; credentials come from where AWS tools look"));
    }
    if url.host().is_none() {
        return Err(malformed("endpoint has no host"));
    }
    Ok(url)
}

/// Whether what is sent to `endpoint` crosses a network in plain http.
pub(super) fn is_in_clear(endpoint: &str) -> bool {
    parse_endpoint(endpoint).is_ok_and(|url| url.scheme() == "http" && !is_loopback(&url))
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

fn objects(bucket: &Bucket, credentials: &Arc<ChainCredentials>) -> Result<Arc<dyn ObjectStore>> {
    let pool = SharedPool::new(CONNECT_TIMEOUT)?;
    let build = |retry: RetryConfig| -> Result<Arc<dyn ObjectStore>> {
        let built = builder(bucket, credentials).with_http_connector(pool.clone());
        Ok(rooted(built.with_retry(retry).build()?, bucket.prefix()))
    };
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
    let patient = RetryConfig { backoff: backoff.clone(), max_retries: 6, retry_timeout: Duration::from_secs(40) };
    let once = RetryConfig { backoff, max_retries: 0, retry_timeout: Duration::ZERO };
    Ok(Arc::new(Routed::new(build(patient)?, build(once)?)))
}

/// The payload is not signed: that would cost a pass of SHA-256 over every byte (0.6 CPU seconds a GiB at the 1.8 GB/s
/// that `openssl speed -bytes 1048576 sha256` shows on the test machine), while TLS (or the loopback) guards the
/// way and every chunk and record carries its own digest, checked on read. Nor is a checksum header sent, for the same
/// reason and because Ceph RGW takes wrong ones for right anyway.
fn builder(bucket: &Bucket, credentials: &Arc<ChainCredentials>) -> AmazonS3Builder {
    let builder = AmazonS3Builder::new()
        .with_bucket_name(bucket.name())
        .with_region(bucket.region())
        .with_credentials(Arc::clone(credentials) as _)
        // Whether http is allowed was settled by `check_endpoint`; all else of the client is the pool's.
        .with_client_options(ClientOptions::new().with_allow_http(true))
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_unsigned_payload(true);
    match bucket.endpoint() {
        Some(endpoint) => builder.with_endpoint(endpoint).with_virtual_hosted_style_request(false),
        None => builder,
    }
}

fn rooted(client: AmazonS3, prefix: &str) -> Arc<dyn ObjectStore> {
    if prefix.is_empty() { Arc::new(client) } else { Arc::new(PrefixStore::new(client, prefix)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn plain_http_stays_on_this_machine_unless_allowed() {
        for local in ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:80/x", "http://127.8.8.8"] {
            check_endpoint(local, false).unwrap();
        }
        for far in ["http://10.0.0.1:9000", "http://localhost.example.com", "http://127.0.0.1.nip.io"] {
            assert_eq!(check_endpoint(far, false).unwrap_err().kind(), ErrorKind::Denied, "{far}");
            check_endpoint(far, true).unwrap();
        }
        check_endpoint("https://s3.example.com", false).unwrap();
        for malformed in
            ["s3.example.com", "ftp://s3.example.com", "http://", "http://192.0.2.1\\@localhost", "http://local\thost"]
        {
            let error = check_endpoint(malformed, true).map_err(|error| error.kind());
            assert_eq!(error, Err(ErrorKind::Usage), "{malformed}");
        }
    }

    #[test]
    fn what_only_looks_like_loopback_is_not() {
        for far in
            ["http://127.0.0.1:9@192.0.2.1:9000", "http://localhost@192.0.2.1", "https://key:hush@s3.example.com"]
        {
            for allow_http in [false, true] {
                let error = check_endpoint(far, allow_http).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage, "{far}");
                assert!(!format!("{error:?}").contains("hush"), "{error:?}");
            }
        }
        // The rest is a path, a query or a fragment of another host.
        for far in ["http://192.0.2.1/@127.0.0.1", "http://192.0.2.1?@127.0.0.1", "http://192.0.2.1#@localhost"] {
            assert_ne!(check_endpoint(far, false).map_err(|error| error.kind()), Ok(()), "{far}");
            assert!(is_in_clear(far), "{far}");
        }
        for near in ["http://LOCALHOST:9000", "http://2130706433", "http://0x7f.1", "http://[::1]"] {
            check_endpoint(near, false).unwrap();
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let keys = Keys { access_key_id: "id".into(), secret_access_key: "hush".into(), session_token: None };
        assert!(!format!("{:?}", StoreOptions { keys: Some(keys), ..StoreOptions::default() }).contains("hush"));
    }
}
