//! Callers of the API: where a request comes from, and whose rights it has.

use std::sync::Arc;

use rustix::process::{Uid, getuid};

use crate::agent::requester::Requester;
use crate::agent::tasks::Task;
use crate::agent::tokens::Grant;
use crate::agent::user::user_name;
use crate::audit::Actor;
use crate::cache::Pin;
use crate::error::Error;
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::policy::LocalCaller;
use crate::transfer::calls::RemoteCaller;

/// Origin of a request.
#[derive(Clone, Debug)]
pub(in crate::agent) enum Caller {
    /// The Unix socket, with the user of the connected process.
    Socket(Uid),
    /// The loopback listener, with the agent's own token or none.
    Loopback,
    /// The loopback listener, with a token with the scope `admin`: all rights.
    Admin(Arc<Grant>),
    /// The loopback listener, with a token with limited rights.
    Token(Arc<Grant>),
    /// The port for peers, with the calling agent.
    Remote(RemoteCaller),
}

impl Caller {
    /// Calling agent, if it is another one.
    pub(super) fn agent(&self) -> Option<&Identity> {
        match self {
            Self::Remote(caller) => Some(caller.identity()),
            Self::Socket(_) | Self::Loopback | Self::Admin(_) | Self::Token(_) => None,
        }
    }

    /// Token of the request, if its rights are limited.
    pub(super) fn grant(&self) -> Option<&Arc<Grant>> {
        match self {
            Self::Token(grant) => Some(grant),
            Self::Socket(_) | Self::Loopback | Self::Admin(_) | Self::Remote(_) => None,
        }
    }

    /// Token of the request, if it can be revoked.
    pub(super) fn token(&self) -> Option<&Arc<Grant>> {
        match self {
            Self::Token(grant) | Self::Admin(grant) => Some(grant),
            Self::Socket(_) | Self::Loopback | Self::Remote(_) => None,
        }
    }

    /// As [`Grant::holding`], for a token; makes it at once for others.
    ///
    /// # Errors
    /// As there.
    pub(super) fn holding<T>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        match self.token() {
            Some(grant) => grant.holding(make),
            None => make(),
        }
    }

    /// Begins a task as by [`Caller::holding`]; a revocation of the token stops it.
    ///
    /// # Errors
    /// As there.
    pub(super) fn begin(&self, begin: impl FnOnce() -> Result<Arc<Task>, Error>) -> Result<Arc<Task>, Error> {
        self.holding(|| {
            let task = begin()?;
            // Tasks of limited callers are stopped by `Requester::stop`.
            if let Self::Admin(grant) = self {
                task.stop_with(grant);
            }
            Ok(task)
        })
    }

    /// Caller with limited rights; None for this node's user, who has all rights.
    pub(super) fn requester(&self) -> Option<Requester> {
        match self {
            Self::Remote(caller) => Some(Requester::Agent(caller.identity().clone())),
            Self::Token(grant) => Some(Requester::Token(Arc::clone(grant))),
            Self::Socket(_) | Self::Loopback | Self::Admin(_) => None,
        }
    }

    /// Owner of a new pin: `given`, else the requesting user. A client with the token on loopback acts as this agent's user. A
    /// caller's own prefix is added; agent names hold no slash, so it cannot forge the owner of another agent.
    pub(super) fn owner(&self, given: Option<String>) -> String {
        let given = given.filter(|given| !given.trim().is_empty());
        match self {
            Self::Remote(caller) => {
                format!("{}/{}", caller.identity().path(), given.unwrap_or_else(|| "agent".to_owned()))
            }
            Self::Token(grant) => {
                let name = || grant.name().map_or_else(|| "token".to_owned(), str::to_owned);
                format!("{}/{}", grant.path(), given.unwrap_or_else(name))
            }
            Self::Socket(user) => given.unwrap_or_else(|| user_name(*user)),
            Self::Loopback | Self::Admin(_) => given.unwrap_or_else(|| user_name(getuid())),
        }
    }

    /// The caller, as the audit log names it.
    pub(super) fn actor(&self) -> Actor {
        match self {
            Self::Remote(caller) => Actor::Agent(caller.identity().clone()),
            Self::Socket(user) => Actor::User(user_name(*user)),
            Self::Token(grant) | Self::Admin(grant) => Actor::Token(grant.label()),
            Self::Loopback => Actor::Token("loopback".to_owned()),
        }
    }

    /// The caller, as rules of a policy name it; None for another agent, whose own callers are unknown here.
    pub(super) fn local(&self) -> Option<LocalCaller> {
        let of_token = |grant: &Arc<Grant>| {
            let id = grant.id().to_string();
            LocalCaller::token(grant.name().unwrap_or(&id), grant.tenant())
        };
        match self {
            Self::Remote(_) => None,
            Self::Socket(user) => Some(LocalCaller::user(&user_name(*user))),
            Self::Loopback => Some(LocalCaller::user(&user_name(getuid()))),
            Self::Token(grant) | Self::Admin(grant) => Some(of_token(grant)),
        }
    }

    /// Tenant, token or agent, if the caller's rights are limited.
    pub(super) fn limited(&self) -> Option<String> {
        match self {
            Self::Remote(caller) => Some(caller.identity().path()),
            Self::Token(_) => self.local().and_then(|caller| caller.limited().map(str::to_owned)),
            Self::Socket(_) | Self::Loopback | Self::Admin(_) => None,
        }
    }

    /// Rule that admits the caller.
    pub(super) fn rule(&self) -> &'static str {
        match self {
            Self::Remote(_) => "callers",
            Self::Socket(_) => "user of the socket",
            Self::Token(_) => "scopes of the token",
            Self::Loopback | Self::Admin(_) => "token",
        }
    }

    /// Checks the repository in a request. Locations are private to this node, so other agents and tokens must use the repository's id.
    ///
    /// # Errors
    /// Usage, for another agent that gives anything but an id.
    pub(super) fn check_repository_name(&self, named: Option<&str>) -> Result<(), Error> {
        match named {
            Some(named) if self.requester().is_some() && named.parse::<RepositoryId>().is_err() => {
                let whose = if self.agent().is_some() { "another agent" } else { "a token" };
                Err(Error::usage(format!("{whose} must name the repository by its id")).got(named))
            }
            _ => Ok(()),
        }
    }

    /// True if the caller may see and end `pin`; other agents and tokens may only see and end their own.
    pub(super) fn has(&self, pin: &Pin) -> bool {
        self.requester().is_none_or(|caller| caller.owns(&pin.owner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;

    #[test]
    fn pins_of_another_agent_are_its_own() {
        let caller =
            |site: &str, agent: &str| Caller::Remote(RemoteCaller::uncounted(Identity::new(site, agent).unwrap()));
        let pin = |owner: &str| Pin {
            id: crate::id::PinId::random(),
            owner: owner.to_owned(),
            reason: String::new(),
            created: Timestamp(0),
            expires: None,
            chunks: 0,
            bytes: 0,
        };
        let here = Caller::Socket(getuid());
        for own in [&here, &Caller::Loopback] {
            assert_eq!(own.owner(None), user_name(getuid()));
            assert_eq!(own.owner(Some(" ".into())), user_name(getuid()));
            assert_eq!(own.owner(Some("the burst".into())), "the burst");
        }
        let theirs = pin(&caller("home", "a").owner(Some("me".into())));
        assert_eq!(theirs.owner, "home/a/me");
        assert!(caller("home", "a").has(&theirs) && here.has(&theirs));
        for other in [caller("home", "b"), caller("cloud", "a")] {
            assert!(!other.has(&theirs), "{other:?}");
        }
        for owner in ["me", "home/a", "home/ab/me", "home", ""] {
            assert!(!caller("home", "a").has(&pin(owner)), "{owner}");
        }
    }
}
