//! Requesters with limited rights: other agents, and holders of tokens.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::tokens::Grant;
use crate::error::Result;
use crate::identity::Identity;

/// Requester with limited rights.
#[derive(Clone, Debug)]
pub(super) enum Requester {
    /// Another agent.
    Agent(Identity),
    /// Holder of a token without the scope `admin`.
    Token(Arc<Grant>),
}

impl PartialEq for Requester {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Agent(one), Self::Agent(other)) => one == other,
            (Self::Token(one), Self::Token(other)) => one.id() == other.id(),
            (Self::Agent(_), Self::Token(_)) | (Self::Token(_), Self::Agent(_)) => false,
        }
    }
}

impl Eq for Requester {}

impl Requester {
    /// Its text, which is also the prefix of the owners of its pins: `SITE/AGENT`, or `token:TENANT/ID`. Names of agents have no
    /// colon, so the two cannot be confused.
    pub(super) fn path(&self) -> String {
        match self {
            Self::Agent(identity) => identity.path(),
            Self::Token(grant) => grant.path(),
        }
    }

    /// Prefix of the owners that are limited together: those of one agent, of the tokens of one tenant, or of one token without a
    /// tenant.
    pub(super) fn limited_owners(&self) -> String {
        match self {
            Self::Agent(identity) => format!("{}/", identity.path()),
            Self::Token(grant) => grant.limited_owners(),
        }
    }

    /// As [`Grant::holding`], for a token; makes it at once for an agent.
    ///
    /// # Errors
    /// As there.
    pub(super) fn holding<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<T> {
        match self {
            Self::Agent(_) => make(),
            Self::Token(grant) => grant.holding(make),
        }
    }

    /// Stop token for a task that it requests; the revocation of an API token cancels it.
    pub(super) fn stop(&self) -> CancellationToken {
        match self {
            Self::Agent(_) => CancellationToken::new(),
            Self::Token(grant) => grant.revocation().child_token(),
        }
    }

    /// True if it is the owner of a pin, by the owner's text.
    pub(super) fn owns(&self, owner: &str) -> bool {
        owner.strip_prefix(&self.path()).is_some_and(|rest| rest.starts_with('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::tokens::Tokens;
    use crate::agent::tokens::tests::granted;
    use crate::clock::{ManualClock, Timestamp};

    #[test]
    fn pins_of_a_tenant_are_limited_together_and_seen_apart() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(&dir.path().join("tokens"), Arc::new(ManualClock::at(Timestamp(0)))).unwrap();
        let token = |tenant: Option<&str>| Requester::Token(granted(&tokens, tenant, &["read=**", "pins"]));
        let (one, other) = (token(Some("team-a")), token(Some("team-a")));
        let (alone, longer) = (token(None), token(Some("team-a.b")));
        assert_eq!(one.limited_owners(), "token:team-a/");
        assert_eq!(one.limited_owners(), other.limited_owners());
        assert!(one != other && one == one.clone());
        for stranger in [&alone, &longer] {
            assert!(!stranger.limited_owners().starts_with(&one.limited_owners()));
            assert!(!one.limited_owners().starts_with(&stranger.limited_owners()));
        }
        let pin = format!("{}/me", one.path());
        assert!(one.owns(&pin) && ![&other, &alone, &longer].iter().any(|another| another.owns(&pin)));
        let agent = Requester::Agent(Identity::new("home", "a").unwrap());
        assert!(agent.owns("home/a/me") && !agent.owns("home/ab/me") && agent != one);
    }
}
