//! Adapter from aws-config's credential chain (environment, profiles, SSO, web identity, containers, instance roles) to
//! `object_store`, which supports neither profiles nor SSO.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use aws_credential_types::Credentials;
use aws_credential_types::credential_feature::AwsCredentialFeature as Feature;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider};
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use tokio::sync::Mutex;

use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, Result};

/// Time before expiry at which credentials are refreshed, so that no request starts with ones that are about to expire.
const REFRESH_BEFORE: Duration = Duration::from_mins(5);
/// Pause after a failed refresh, during which still valid credentials are used.
const RETRY_AFTER: Duration = Duration::from_secs(15);

/// A credential chain with a cache: queried once, then again shortly before the credentials expire.
pub struct ChainCredentials {
    provider: SharedCredentialsProvider,
    profile: String,
    cached: Mutex<Option<Cached>>,
}

#[derive(Clone)]
struct Cached {
    credential: Arc<AwsCredential>,
    origin: String,
    expires: Option<Timestamp>,
    ask_again: Option<Timestamp>,
}

impl ChainCredentials {
    /// Wraps `provider`; `profile` is the name to display if the credentials come from a profile.
    #[must_use]
    pub fn new(provider: SharedCredentialsProvider, profile: String) -> Self {
        Self { provider, profile, cached: Mutex::new(None) }
    }

    /// Origin of the credentials, for `doctor`: `environment variables`, `profile "work"`, ... Queries the chain if there are
    /// none yet.
    pub async fn origin(&self) -> Result<String> {
        Ok(self.current().await?.origin)
    }

    /// Id of the access key, which is not secret.
    pub async fn key_id(&self) -> Result<String> {
        Ok(self.current().await?.credential.key_id.clone())
    }

    /// Current credentials. Concurrent callers wait for the same refresh. Cancel safe: the next caller restarts an abandoned
    /// refresh.
    async fn current(&self) -> Result<Cached> {
        let mut cached = self.cached.lock().await;
        let now = SystemClock.now();
        if let Some(fresh) = cached.as_ref().filter(|c| c.ask_again.is_none_or(|when| now < when)) {
            return Ok(fresh.clone());
        }
        match self.provider.provide_credentials().await {
            Ok(credentials) => {
                let fresh = self.digest(&credentials);
                Ok(cached.insert(fresh).clone())
            }
            Err(error) => match cached.as_mut() {
                Some(old) if old.expires.is_some_and(|expires| now < expires) => {
                    tracing::warn!(%error, "credentials could not be refreshed; the old ones are still good");
                    old.ask_again = Some(later(now, RETRY_AFTER));
                    Ok(old.clone())
                }
                _ => Err(self.absent().source(error)),
            },
        }
    }

    /// Error for missing credentials. It names a profile that the user chose and that is in no file.
    fn absent(&self) -> Error {
        let files = ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"].map(|name| std::env::var(name).ok());
        let [config, credentials] = files;
        let home = std::env::var("HOME").unwrap_or_default();
        let files = [
            config.unwrap_or_else(|| format!("{home}/.aws/config")),
            credentials.unwrap_or_else(|| format!("{home}/.aws/credentials")),
        ];
        let has_profile =
            |file: &String| std::fs::read_to_string(file).is_ok_and(|text| has_profile(&text, &self.profile));
        if std::env::var_os("AWS_PROFILE").is_some() && !files.iter().any(has_profile) {
            return Error::denied(format!("no credentials for the store: there is no profile {:?}", self.profile))
                .at(files.join(" and "))
                .help("set AWS_PROFILE to one that is there, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
        }
        Error::denied("no credentials for the store")
            .at(format!("profile {:?} and the rest of the chain", self.profile))
            .help("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run `aws sso login`")
    }

    fn digest(&self, credentials: &Credentials) -> Cached {
        let expires = credentials.expiry().map(Timestamp::from);
        Cached {
            credential: Arc::new(AwsCredential {
                key_id: credentials.access_key_id().to_owned(),
                secret_key: credentials.secret_access_key().to_owned(),
                token: credentials.session_token().map(str::to_owned),
            }),
            origin: origin(credentials, &self.profile),
            expires,
            ask_again: credentials.expiry().map(|expiry| earlier(expiry, REFRESH_BEFORE)),
        }
    }
}

/// True if `text`, of a file of profiles, has `profile`
/// (<https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html>).
fn has_profile(text: &str, profile: &str) -> bool {
    let heads = text.lines().filter_map(|line| line.trim().strip_prefix('[')?.split_once(']'));
    heads.map(|(head, _)| head.trim()).any(|head| head.strip_prefix("profile ").unwrap_or(head).trim() == profile)
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    Timestamp(now.0.saturating_add(i64::try_from(by.as_nanos()).unwrap_or(i64::MAX)))
}

fn earlier(time: SystemTime, by: Duration) -> Timestamp {
    Timestamp(Timestamp::from(time).0.saturating_sub(i64::try_from(by.as_nanos()).unwrap_or(i64::MAX)))
}

/// Origin of credentials by their recorded sources: a profile together with its own source, else the last source, because a role
/// is assumed with the credentials of an earlier one.
fn origin(credentials: &Credentials, profile: &str) -> String {
    let features = credentials.get_property::<Vec<Feature>>().map_or(&[][..], Vec::as_slice);
    let how = features.iter().rev().find_map(|feature| match feature {
        Feature::CredentialsEnvVars => Some("environment variables"),
        Feature::CredentialsEnvVarsStsWebIdToken
        | Feature::CredentialsProfileStsWebIdToken
        | Feature::CredentialsStsAssumeRoleWebId => Some("a web identity token"),
        Feature::CredentialsStsAssumeRole => Some("an assumed role"),
        Feature::CredentialsSso | Feature::CredentialsProfileSso => Some("SSO"),
        Feature::CredentialsProcess | Feature::CredentialsProfileProcess => Some("a credential process"),
        Feature::CredentialsHttp => Some("the container's endpoint"),
        Feature::CredentialsImds => Some("the instance's role"),
        Feature::CredentialsCode => Some("keys given by the caller"),
        _ => None,
    });
    let from_profile = features.iter().any(|feature| {
        matches!(
            feature,
            Feature::CredentialsProfile
                | Feature::CredentialsProfileSourceProfile
                | Feature::CredentialsProfileNamedProvider
                | Feature::CredentialsProfileSso
                | Feature::CredentialsProfileProcess
        )
    });
    match (how, from_profile) {
        (Some(how), true) => format!("{how}, by profile {profile:?}"),
        (Some(how), false) => how.to_owned(),
        (None, true) => format!("profile {profile:?}"),
        (None, false) => "a source that does not say what it is".to_owned(),
    }
}

impl fmt::Debug for ChainCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainCredentials").field("profile", &self.profile).finish_non_exhaustive()
    }
}

#[async_trait]
impl CredentialProvider for ChainCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        match self.current().await {
            Ok(cached) => Ok(cached.credential),
            Err(error) => {
                Err(object_store::Error::Unauthenticated { path: "credentials".to_owned(), source: Box::new(error) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_credential_types::provider::{error::CredentialsError, future};
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn profiles_of_both_files_are_found() {
        let text = "# [no]\n[default]\nregion = x\n [profile work] \nsso = [y]\n[other]\n";
        assert_eq!(
            ["default", "work", "other", "no", "y", "profile work"].map(|profile| has_profile(text, profile)),
            [true, true, true, false, false, false]
        );
    }

    /// Gives credentials that live for `life`, the first `good` times.
    #[derive(Debug)]
    struct Scripted {
        life: Option<Duration>,
        good: u32,
        asked: Arc<AtomicU32>,
    }

    impl ProvideCredentials for Scripted {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let nth = self.asked.fetch_add(1, Ordering::SeqCst);
            future::ProvideCredentials::ready(if nth < self.good {
                let now = SystemTime::UNIX_EPOCH + Duration::from_nanos(SystemClock.now().0.unsigned_abs());
                let mut given = Credentials::new("id", "secret", None, self.life.map(|life| now + life), "test");
                given.get_property_mut_or_default::<Vec<Feature>>().push(Feature::CredentialsProfile);
                Ok(given)
            } else {
                Err(CredentialsError::not_loaded("nothing left"))
            })
        }
    }

    fn chain(life: Option<Duration>, good: u32) -> (ChainCredentials, Arc<AtomicU32>) {
        let asked = Arc::new(AtomicU32::new(0));
        let provider = Scripted { life, good, asked: Arc::clone(&asked) };
        (ChainCredentials::new(SharedCredentialsProvider::new(provider), "work".into()), asked)
    }

    #[tokio::test]
    async fn the_chain_is_asked_once_while_its_answer_is_good() {
        for life in [None, Some(Duration::from_hours(1))] {
            let (credentials, asked) = chain(life, 1);
            for _ in 0..3 {
                assert_eq!(credentials.get_credential().await.unwrap().key_id, "id");
            }
            assert_eq!(asked.load(Ordering::SeqCst), 1);
            assert_eq!(credentials.origin().await.unwrap(), "profile \"work\"");
        }
    }

    #[tokio::test]
    async fn dying_credentials_are_renewed_and_used_if_that_fails() {
        let (credentials, asked) = chain(Some(Duration::from_mins(1)), 2);
        for _ in 0..4 {
            credentials.get_credential().await.unwrap();
        }
        assert_eq!(asked.load(Ordering::SeqCst), 3, "renewed once, failed once, then left alone for a while");
    }

    #[tokio::test]
    async fn no_credentials_at_all_is_denied() {
        let (credentials, _) = chain(None, 0);
        assert_eq!(credentials.origin().await.unwrap_err().kind(), crate::ErrorKind::Denied);
        let error = credentials.get_credential().await.unwrap_err();
        assert_eq!(Error::from(error).kind(), crate::ErrorKind::Denied);
    }
}
