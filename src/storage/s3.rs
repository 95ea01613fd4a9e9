//! Opening a bucket: finds endpoint, region and credentials like every AWS tool, then creates the clients.

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

use super::bucket::Bucket;
use super::credentials::ChainCredentials;
use super::endpoint::check_endpoint;
use super::http::{ResponseLengthLimit, SharedPool};
use super::options::{Keys, StoreOptions};
use super::pages::Pages;
use super::routed::Routed;
use crate::error::{Error, Result};

/// Timeout of a TCP and TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Clients for the objects below `prefix` of `bucket`, and for the bucket itself; sends no request.
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

    let mut sdk =
        aws_sdk_s3::config::Builder::from(&config).region(Region::new(region.clone())).interceptor(ResponseLengthLimit);
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
    // Outside of AWS there is no instance metadata service, and a query would cost seconds.
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

/// Endpoint from the caller or the environment.
fn named_endpoint(options: &StoreOptions) -> Option<String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    options.endpoint.clone().or_else(|| variable("AWS_ENDPOINT_URL_S3")).or_else(|| variable("AWS_ENDPOINT_URL"))
}

/// Endpoint if it is not that of AWS, without a trailing slash.
fn endpoint(options: &StoreOptions, config: &SdkConfig) -> Option<String> {
    let found = named_endpoint(options).or_else(|| config.endpoint_url().map(str::to_owned))?;
    Some(found.trim_end_matches('/').to_owned())
}

fn objects(bucket: &Bucket, credentials: &Arc<ChainCredentials>) -> Result<Arc<dyn ObjectStore>> {
    let pool = SharedPool::new(CONNECT_TIMEOUT)?;
    let build = |retry: RetryConfig| -> Result<Arc<dyn ObjectStore>> {
        let built = builder(bucket, credentials).with_http_connector(pool.clone()).with_retry(retry);
        let singly = built.clone().with_disable_bulk_delete(true).build()?;
        Ok(rooted(Pages::new(built.build()?, singly, bucket.clone()), bucket.prefix()))
    };
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
    let patient = RetryConfig { backoff: backoff.clone(), max_retries: 6, retry_timeout: Duration::from_secs(40) };
    let once = RetryConfig { backoff, max_retries: 0, retry_timeout: Duration::ZERO };
    Ok(Arc::new(Routed::new(build(patient)?, build(once)?)))
}

/// Builder of the client. The payload is not signed: that would cost a pass of SHA-256 over every byte (0.6 CPU seconds per GiB
/// at 1.8 GB/s, by `openssl speed -bytes 1048576 sha256` on the test machine). TLS (or the loopback) protects the transfer, and
/// every chunk and record has a digest that is verified when it is read. For the same reason no checksum header is sent; Ceph RGW
/// also accepts wrong ones.
fn builder(bucket: &Bucket, credentials: &Arc<ChainCredentials>) -> AmazonS3Builder {
    let builder = AmazonS3Builder::new()
        .with_bucket_name(bucket.name())
        .with_region(bucket.region())
        .with_credentials(Arc::clone(credentials) as _)
        // `check_endpoint` has decided about http; all other options of the client are those of the pool.
        .with_client_options(ClientOptions::new().with_allow_http(true))
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_unsigned_payload(true);
    match bucket.endpoint() {
        Some(endpoint) => builder.with_endpoint(endpoint).with_virtual_hosted_style_request(false),
        None => builder,
    }
}

fn rooted(client: Pages<AmazonS3>, prefix: &str) -> Arc<dyn ObjectStore> {
    if prefix.is_empty() { Arc::new(client) } else { Arc::new(PrefixStore::new(client, prefix)) }
}
