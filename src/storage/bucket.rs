//! Bucket operations that `object_store` lacks: creation, rules, unfinished uploads.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::{
    AbortIncompleteMultipartUpload as Aborts, BucketLocationConstraint, BucketVersioningStatus,
    CreateBucketConfiguration, ExpirationStatus,
};
use chrono::DateTime;
use object_store::list::{PaginatedListOptions, PaginatedListResult};
use object_store::path::Path;
use object_store::{Extensions, ListResult, ObjectMeta};
use url::Url;

use super::credentials::ChainCredentials;
use super::http::{is_redirect, redirected};
use super::pages::EMPTY_PAGES_MAX;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};

/// A bucket, the prefix below which the repository lives, and the SDK's client for it. Cheap to clone.
#[derive(Clone)]
pub struct Bucket(Arc<Inner>);

struct Inner {
    client: Client,
    name: String,
    prefix: String,
    region: String,
    endpoint: Option<String>,
    credentials: Arc<ChainCredentials>,
}

/// Whether a bucket keeps old versions. If it does, deleting frees no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versioning {
    /// Never enabled.
    Off,
    /// Every overwrite and delete keeps the old bytes.
    Enabled,
    /// Disabled again: older versions still exist.
    Suspended,
}

/// A lifecycle rule, reduced to the relevant parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifecycleRule {
    /// Name.
    pub id: String,
    /// Prefix of the keys that it applies to.
    pub prefix: String,
    /// True if it is enabled.
    pub enabled: bool,
    /// True if it deletes live objects.
    pub expires: bool,
    /// Storage classes that it moves objects to.
    pub moves_to: Vec<String>,
    /// Days after which it aborts unfinished uploads.
    pub aborts_after_days: Option<i32>,
}

/// The object-lock rule of a bucket. While it applies, deletes are refused, or only hide objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectLock {
    /// `GOVERNANCE` or `COMPLIANCE`, if new objects are locked by default.
    pub mode: Option<String>,
    /// Duration in days.
    pub days: Option<i32>,
    /// Duration in years.
    pub years: Option<i32>,
}

/// Unfinished uploads that are listed at once, about: a later listing has the rest.
const UPLOADS_MAX: usize = 100_000;

/// A multipart upload that was neither completed nor aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// Full key, including the prefix.
    pub key: String,
    /// The upload's id.
    pub upload_id: String,
    /// Time of its start, by the store's clock.
    pub initiated: Timestamp,
}

/// Variables of proxies that HTTP clients use (<https://docs.rs/reqwest/latest/reqwest/#proxies>).
const PROXIES: [&str; 6] = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

impl Bucket {
    pub(super) fn new(
        client: Client,
        name: &str,
        prefix: &str,
        region: String,
        endpoint: Option<String>,
        credentials: Arc<ChainCredentials>,
    ) -> Self {
        Self(Arc::new(Inner {
            client,
            name: name.to_owned(),
            prefix: prefix.to_owned(),
            region,
            endpoint,
            credentials,
        }))
    }

    /// The SDK's client: checksums only where an operation demands them, path-style if there is an endpoint.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.0.client
    }

    /// Name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The repository's prefix: no slash at either end, may be empty.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.0.prefix
    }

    /// The region that requests are signed for.
    #[must_use]
    pub fn region(&self) -> &str {
        &self.0.region
    }

    /// Endpoint, if it is not that of AWS.
    #[must_use]
    pub fn endpoint(&self) -> Option<&str> {
        self.0.endpoint.as_deref()
    }

    /// URL `ENDPOINT/BUCKET/PREFIX`; None without an endpoint.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        let endpoint = Url::parse(self.endpoint()?).ok()?;
        let path = [endpoint.as_str().trim_end_matches('/'), self.name(), self.prefix()].join("/");
        Some(path.trim_end_matches('/').to_owned())
    }

    /// True if requests cross a network in plain http, which the caller must have allowed explicitly.
    #[must_use]
    pub fn is_in_clear(&self) -> bool {
        self.endpoint().is_some_and(super::endpoint::is_in_clear)
    }

    /// Credentials, and their origin.
    #[must_use]
    pub fn credentials(&self) -> &ChainCredentials {
        &self.0.credentials
    }

    /// Full key of the repository's object `key`.
    #[must_use]
    pub fn full_key(&self, key: &str) -> String {
        format!("{}{key}", self.key_prefix())
    }

    /// Prefix of all keys of the repository, with a slash at the end, so that `repo` is not a prefix of `repo2`.
    fn key_prefix(&self) -> String {
        if self.prefix().is_empty() { String::new() } else { format!("{}/", self.prefix()) }
    }

    /// Checks access by listing one key below the prefix: `NotFound` without the bucket, `Denied` or `Unreachable` otherwise. It
    /// needs only rights that a repository needs anyway.
    pub async fn check(&self) -> Result<()> {
        let request = self.client().list_objects_v2().bucket(self.name()).prefix(self.key_prefix()).max_keys(1);
        match request.send().await {
            Ok(_) => Ok(()),
            Err(error) => match self.failed("bucket cannot be opened", error) {
                missing if missing.kind() == ErrorKind::NotFound => {
                    Err(missing.help(format!("check its name; `towline init s3://{}/PREFIX` creates it", self.name())))
                }
                error => Err(error),
            },
        }
    }

    /// Creates the bucket if it does not exist; returns true if it was created. Idempotent, also in a race.
    ///
    /// # Errors
    /// Usage, if it does not exist and its name is not one for new buckets.
    pub async fn create_if_missing(&self) -> Result<bool> {
        match self.client().head_bucket().bucket(self.name()).send().await {
            Ok(_) => return Ok(false),
            Err(error) => match self.failed("bucket cannot be looked up", error) {
                missing if missing.kind() == ErrorKind::NotFound && is_bucket_name(self.name()) => {}
                other
                    if matches!(other.kind(), ErrorKind::NotFound | ErrorKind::Other)
                        && !is_bucket_name(self.name()) =>
                {
                    return Err(Error::usage("not a name for a bucket")
                        .at(self)
                        .expected("3 to 63 lower-case letters, digits, hyphens and dots")
                        .got(self.name())
                        .source(other));
                }
                // The right to query the bucket may be missing although it can be used: `check` decides.
                denied if denied.kind() == ErrorKind::Denied => return Ok(false),
                error => return Err(error),
            },
        }
        let mut request = self.client().create_bucket().bucket(self.name());
        // AWS requires the region, except in its first one; other stores use other names for regions.
        if self.endpoint().is_none() && self.region() != "us-east-1" {
            let place = BucketLocationConstraint::from(self.region());
            request = request
                .create_bucket_configuration(CreateBucketConfiguration::builder().location_constraint(place).build());
        }
        match request.send().await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Some("BucketAlreadyOwnedByYou") => Ok(false),
            Err(error) => Err(self.failed("bucket cannot be made", error)),
        }
    }

    /// Reads whether the bucket keeps old versions.
    pub async fn versioning(&self) -> Result<Versioning> {
        let found = self.client().get_bucket_versioning().bucket(self.name()).send().await;
        let found = found.map_err(|e| self.failed("versioning cannot be read", e))?;
        Ok(match found.status() {
            Some(BucketVersioningStatus::Enabled) => Versioning::Enabled,
            Some(BucketVersioningStatus::Suspended) => Versioning::Suspended,
            _ => Versioning::Off,
        })
    }

    /// Lifecycle rules that apply to the repository's keys.
    pub async fn lifecycle(&self) -> Result<Vec<LifecycleRule>> {
        let found = self.client().get_bucket_lifecycle_configuration().bucket(self.name()).send().await;
        let rules = match found {
            Ok(found) => found.rules.unwrap_or_default(),
            Err(error) if error.code() == Some("NoSuchLifecycleConfiguration") => Vec::new(),
            Err(error) => return Err(self.failed("lifecycle rules cannot be read", error)),
        };
        let ours = self.key_prefix();
        let rules = rules.iter().filter(|rule| !is_by_tag(rule)).map(LifecycleRule::read);
        Ok(rules.filter(|rule| ours.starts_with(&rule.prefix) || rule.prefix.starts_with(&ours)).collect())
    }

    /// Object-lock configuration, if there is one.
    pub async fn object_lock(&self) -> Result<Option<ObjectLock>> {
        let found = match self.client().get_object_lock_configuration().bucket(self.name()).send().await {
            Ok(found) => found.object_lock_configuration,
            Err(error) if error.code() == Some("ObjectLockConfigurationNotFoundError") => None,
            Err(error) => return Err(self.failed("object lock cannot be read", error)),
        };
        Ok(found.filter(|lock| lock.object_lock_enabled().is_some()).map(|lock| {
            let retention = lock.rule().and_then(|rule| rule.default_retention());
            ObjectLock {
                mode: retention.and_then(|r| r.mode()).map(|mode| mode.as_str().to_owned()),
                days: retention.and_then(aws_sdk_s3::types::DefaultRetention::days),
                years: retention.and_then(aws_sdk_s3::types::DefaultRetention::years),
            }
        }))
    }

    /// Unfinished multipart uploads below the prefix whose keys, without the prefix, are `ours`.
    /// Cancel safe: it only reads.
    pub async fn unfinished_uploads(&self, ours: impl Fn(&str) -> bool) -> Result<Vec<UnfinishedUpload>> {
        let prefix = self.key_prefix();
        let is_ours = |upload: &UnfinishedUpload| upload.key.strip_prefix(&prefix).is_some_and(&ours);
        let mut uploads = Vec::new();
        let (mut key_marker, mut id_marker) = (None, None);
        let mut empty = 0;
        loop {
            let request = self.client().list_multipart_uploads().bucket(self.name()).prefix(self.key_prefix());
            let request = request.set_key_marker(key_marker.clone()).set_upload_id_marker(id_marker.clone());
            let page = request.send().await.map_err(|e| self.failed("unfinished uploads cannot be listed", e))?;
            uploads.extend(page.uploads().iter().filter_map(unfinished).filter(is_ours));
            let page_is_empty = page.uploads().is_empty();
            let more = page.is_truncated() == Some(true) && page.next_key_marker().is_some();
            if !more || uploads.len() >= UPLOADS_MAX {
                return Ok(uploads);
            }
            let next = (page.next_key_marker, page.next_upload_id_marker);
            empty = if page_is_empty { empty + 1 } else { 0 };
            // Keys are in order (ListMultipartUploads in the API reference of S3): otherwise the listing may never end.
            if next.0 < key_marker || next == (key_marker, id_marker) || empty > EMPTY_PAGES_MAX {
                return Err(Error::unreachable("listing of unfinished uploads does not get on")
                    .at(self.name())
                    .got(format!("again from {}", next.0.unwrap_or_default())));
            }
            (key_marker, id_marker) = next;
        }
    }

    /// A page of the listing of the whole bucket, without the keys that are no paths (`a//b`, `a/../b`): they belong to other
    /// programs.
    pub(super) async fn page_of_paths(
        &self,
        prefix: Option<&str>,
        options: PaginatedListOptions,
    ) -> Result<PaginatedListResult> {
        let PaginatedListOptions { offset, delimiter, page_token, .. } = options;
        let request = self.client().list_objects_v2().bucket(self.name()).set_prefix(prefix.map(str::to_owned));
        let request = request.set_start_after(offset).set_continuation_token(page_token);
        let request = request.set_delimiter(delimiter.map(Cow::into_owned));
        let page = request.send().await.map_err(|e| self.failed("objects cannot be listed", e))?;
        let folders = page.common_prefixes().iter().filter_map(|folder| Path::parse(folder.prefix()?).ok());
        let mut result =
            ListResult { common_prefixes: folders.collect(), objects: Vec::new(), extensions: Extensions::default() };
        for object in page.contents() {
            let key = object.key().unwrap_or_default();
            if let Ok(location) = Path::parse(key) {
                let meta = object_meta(location, object);
                result.objects.push(meta.ok_or_else(|| {
                    Error::unreachable("store lists an object without its size or its time")
                        .at(format!("s3://{}/{key}", self.name()))
                })?);
            }
        }
        Ok(PaginatedListResult { result, page_token: page.next_continuation_token })
    }

    /// Aborts `uploads`. A missing one is no error.
    /// Cancel safe: running it again finishes the job.
    pub async fn abort_uploads(&self, uploads: &[UnfinishedUpload]) -> Result<()> {
        for upload in uploads {
            let request = self.client().abort_multipart_upload().bucket(self.name());
            match request.key(&upload.key).upload_id(&upload.upload_id).send().await {
                Ok(_) => {}
                Err(error) if error.code() == Some("NoSuchUpload") => {}
                Err(error) => return Err(self.failed("unfinished upload cannot be aborted", error).at(&upload.key)),
            }
        }
        Ok(())
    }

    /// Deletes the repository's object `key` if its `ETag` is `etag`: `Conflict` if it is another. For the probe: many
    /// stores ignore the condition.
    pub(super) async fn delete_if_match(&self, key: &str, etag: &str) -> Result<()> {
        let request = self.client().delete_object().bucket(self.name()).key(self.full_key(key)).if_match(etag);
        match request.send().await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed("object cannot be deleted", error)),
        }
    }

    fn failed<E>(&self, what: &'static str, error: SdkError<E, HttpResponse>) -> Error
    where
        E: std::error::Error + ProvideErrorMetadata + Send + Sync + 'static,
    {
        let status = error.raw_response().map(|response| response.status().as_u16());
        let header = |name| error.raw_response().and_then(|r| r.headers().get(name)).map(str::to_owned);
        let elsewhere = header("x-amz-bucket-region");
        let built = match (status, elsewhere) {
            (Some(301 | 400), Some(region)) if region != self.region() => {
                Error::usage("bucket is in another region").expected(region).got(self.region()).help("set AWS_REGION")
            }
            (Some(status), region) if is_redirect(status) => {
                redirected(status, header("location").as_deref(), region.as_deref())
            }
            (Some(status), _) => match kind_of(status) {
                ErrorKind::Denied => {
                    Error::denied(what).help(error.code().and_then(credentials_help).unwrap_or(RIGHTS_HELP))
                }
                kind => Error::new(kind, what),
            },
            (None, _) if lacks_credentials(&error) => {
                Error::denied("no credentials for the store").help("set AWS_PROFILE or AWS_ACCESS_KEY_ID")
            }
            (None, _) => {
                Error::unreachable("store does not answer").help(network_help(|name| std::env::var(name).ok()))
            }
        };
        built.at(self).source(error)
    }
}

/// Help where the store cannot be reached: a proxy of the environment, which is used for it, may be the reason.
fn network_help(env: impl Fn(&str) -> Option<String>) -> String {
    let set = PROXIES.iter().filter(|name| env(name).is_some_and(|value| !value.is_empty())).copied();
    let set: Vec<&str> = set.collect();
    if set.is_empty() {
        return "check the endpoint and the network".to_owned();
    }
    let proxies = set.join(" and ");
    format!("check the endpoint, the network and the proxy in {proxies}; NO_PROXY=HOST leaves a host out")
}

/// True for the name of a new bucket (<https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html>). Old ones may have
/// others.
fn is_bucket_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = [name.bytes().next(), name.bytes().last()];
    (3..=63).contains(&name.len())
        && name.bytes().all(|byte| is_inner(byte) || b"-.".contains(&byte))
        && ends.into_iter().flatten().all(is_inner)
}

const fn kind_of(status: u16) -> ErrorKind {
    match status {
        404 => ErrorKind::NotFound,
        401 | 403 => ErrorKind::Denied,
        409 | 412 => ErrorKind::Conflict,
        405 | 501 => ErrorKind::Unsupported,
        429 | 500.. => ErrorKind::Unreachable,
        _ => ErrorKind::Other,
    }
}

/// Advice for a request that the store refuses without saying that the credentials are wrong.
pub(crate) const RIGHTS_HELP: &str = "check the credentials and their rights; `towline doctor` shows them";

/// Advice for credentials that the store does not accept, by its error code
/// (<https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList>).
fn credentials_help(code: &str) -> Option<&'static str> {
    match code {
        "SignatureDoesNotMatch" => {
            Some("the secret access key does not belong to the access key id: set AWS_SECRET_ACCESS_KEY")
        }
        "InvalidAccessKeyId" => {
            Some("the store does not know the access key id: set AWS_ACCESS_KEY_ID, or AWS_PROFILE")
        }
        "ExpiredToken" | "InvalidToken" => Some("the session token is not valid any more: get new credentials"),
        "RequestTimeTooSkewed" => Some("set this machine's clock"),
        _ => None,
    }
}

fn lacks_credentials(error: &(dyn std::error::Error + 'static)) -> bool {
    use aws_credential_types::provider::error::CredentialsError;
    std::iter::successors(Some(error), |cause| cause.source()).any(<dyn std::error::Error>::is::<CredentialsError>)
}

fn object_meta(location: Path, object: &aws_sdk_s3::types::Object) -> Option<ObjectMeta> {
    let time = object.last_modified()?;
    Some(ObjectMeta {
        location,
        last_modified: DateTime::from_timestamp(time.secs(), time.subsec_nanos())?,
        size: u64::try_from(object.size()?).ok()?,
        e_tag: object.e_tag().map(str::to_owned),
        version: None,
    })
}

fn unfinished(upload: &aws_sdk_s3::types::MultipartUpload) -> Option<UnfinishedUpload> {
    Some(UnfinishedUpload {
        key: upload.key()?.to_owned(),
        upload_id: upload.upload_id()?.to_owned(),
        initiated: Timestamp(i64::try_from(upload.initiated()?.as_nanos()).ok()?),
    })
}

/// True if a rule applies only to objects with some tag, which Towline's objects never have.
fn is_by_tag(rule: &aws_sdk_s3::types::LifecycleRule) -> bool {
    rule.filter().is_some_and(|f| f.tag().is_some() || f.and().is_some_and(|and| !and.tags().is_empty()))
}

impl LifecycleRule {
    fn read(rule: &aws_sdk_s3::types::LifecycleRule) -> Self {
        let filter = rule.filter();
        let within = filter.and_then(|f| f.prefix().or_else(|| f.and().and_then(|and| and.prefix())));
        #[expect(deprecated, reason = "rules written long ago still carry their prefix there")]
        let prefix = within.or(rule.prefix()).unwrap_or_default().to_owned();
        let expiration = rule.expiration();
        Self {
            id: rule.id().unwrap_or_default().to_owned(),
            prefix,
            enabled: *rule.status() == ExpirationStatus::Enabled,
            expires: expiration.is_some_and(|e| e.days().is_some() || e.date().is_some()),
            moves_to: rule
                .transitions()
                .iter()
                .filter_map(|t| t.storage_class().map(|class| class.as_str().to_owned()))
                .collect(),
            aborts_after_days: rule.abort_incomplete_multipart_upload().and_then(Aborts::days_after_initiation),
        }
    }

    /// True if the rule would delete, or make inaccessible, objects that a repository needs.
    #[must_use]
    pub fn hurts(&self) -> bool {
        let asleep = |class: &String| matches!(class.as_str(), "GLACIER" | "DEEP_ARCHIVE");
        self.enabled && (self.expires || self.moves_to.iter().any(asleep))
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.name())?;
        match self.endpoint() {
            Some(endpoint) => write!(f, " on {endpoint}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { name, prefix, region, endpoint, .. } = &*self.0;
        f.debug_struct("Bucket")
            .field("name", name)
            .field("prefix", prefix)
            .field("region", region)
            .field("endpoint", endpoint)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_named_where_a_store_cannot_be_reached() {
        let env = |name: &str| (name == "http_proxy").then(|| "http://127.0.0.1:9".to_owned());
        assert!(network_help(env).contains("the proxy in http_proxy; NO_PROXY=HOST"), "{}", network_help(env));
        assert_eq!(network_help(|_| Some(String::new())), "check the endpoint and the network");
    }

    #[test]
    fn names_of_new_buckets() {
        for name in ["abc", "my-bucket.eu", "0a1", &"a".repeat(63)] {
            assert!(is_bucket_name(name), "{name}");
        }
        for name in ["ab", "Bad_Bucket", "-abc", "abc.", "a b", "\u{e4}bc", &"a".repeat(64)] {
            assert!(!is_bucket_name(name), "{name}");
        }
    }
}
