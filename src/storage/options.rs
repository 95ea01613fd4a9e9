//! Options to open a store with.

use std::fmt;
use std::time::Duration;

use super::directory::Sharing;

/// A request without progress for this long fails.
pub const STALL: Duration = Duration::from_mins(1);

/// Options to open a store with.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// S3 endpoint; by default `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, that of the profile, or AWS.
    pub endpoint: Option<String>,
    /// Allows plain http to other machines.
    pub allow_http: bool,
    /// Creates the directory or bucket if it does not exist.
    pub create: bool,
    /// Sharing of a new repository in a directory; by default none. An existing one keeps its setting.
    pub shared: Option<Sharing>,
    /// S3 region; by default that of the environment, the profile or the instance, or `us-east-1`.
    pub region: Option<String>,
    /// S3 keys to use instead of the credential chain.
    pub keys: Option<Keys>,
    /// A request without progress for this long fails.
    pub stall: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { endpoint: None, allow_http: false, create: false, shared: None, region: None, keys: None, stall: STALL }
    }
}

/// Keys from the caller, used instead of the credential chain.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let keys = Keys { access_key_id: "id".into(), secret_access_key: "hush".into(), session_token: None };
        assert!(!format!("{:?}", StoreOptions { keys: Some(keys), ..StoreOptions::default() }).contains("hush"));
    }
}
