//! Who may use the API. The Unix socket can be reached by its user alone; on loopback any process can connect, and a browser can be
//! made to; through the port for peers, agents of the authority call.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use rustix::process::{Uid, getuid};

use super::error::ApiError;
use crate::agent::AT;
use crate::agent::config::Accepts;
use crate::agent::user::user_name;
use crate::cache::Pin;
use crate::error::Error;
use crate::id::RepositoryId;
use crate::transfer::calls::RemoteCaller;
use crate::transfer::exchange::Callers as Agents;
use crate::transfer::identity::Identity;

/// Paths on loopback that need no token: liveness and readiness without details, and the API's description.
pub(super) const OPEN: [&str; 3] = ["/health", "/ready", "/openapi.json"];
/// Path that needs no token if `open_metrics` is set.
const METRICS: &str = "/metrics";

/// What another agent may ask, if it may ask anything: to bring chunks to this node and keep them, and how that goes; of those that may
/// give checkpoints into handoff, that. Nothing that touches the node's files, or what others have begun.
pub(super) const REMOTE: [(&str, &str); 16] = [
    ("GET", "/health"),
    ("GET", "/ready"),
    ("POST", "/v1/warm"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/tasks/{id}"),
    ("DELETE", "/v1/tasks/{id}"),
    ("GET", "/v1/tasks/{id}/events"),
    ("GET", "/v1/pins"),
    ("POST", "/v1/pins"),
    ("DELETE", "/v1/pins/{id}"),
    ("GET", "/v1/cache"),
    ("GET", "/v1/peers"),
    ("GET", HANDOFFS),
    ("POST", HANDOFFS),
    ("PUT", "/v1/handoffs/{id}"),
    ("DELETE", "/v1/handoffs/{id}"),
];
const HANDOFFS: &str = "/v1/handoffs";

/// Agents that are let in.
#[derive(Clone, Debug, Default)]
pub(in crate::agent) struct Callers {
    /// To all of [`REMOTE`] but handoff.
    pub(in crate::agent) to_ask: Agents,
    /// To handoff.
    pub(in crate::agent) to_give: Accepts,
}

/// Origin of a request.
#[derive(Clone, Debug)]
pub(in crate::agent) enum Caller {
    /// The Unix socket; a process of this user has connected.
    Socket(Uid),
    /// The loopback address.
    Loopback,
    /// The port for peers; this one calls.
    Remote(RemoteCaller),
}

impl Caller {
    /// The other agent that calls, if one does.
    pub(super) fn agent(&self) -> Option<&Identity> {
        match self {
            Self::Remote(caller) => Some(caller.identity()),
            Self::Socket(_) | Self::Loopback => None,
        }
    }

    /// Owner of the pins that are asked for: `told`, else the asking user. Whoever has the token on
    /// loopback can read this agent's files. Names of agents hold no slash, so nobody can write another's.
    pub(super) fn owner(&self, given: Option<String>) -> String {
        let given = given.filter(|given| !given.trim().is_empty());
        match self {
            Self::Remote(caller) => {
                format!("{}/{}", caller.identity().path(), given.unwrap_or_else(|| "agent".to_owned()))
            }
            Self::Socket(user) => given.unwrap_or_else(|| user_name(*user)),
            Self::Loopback => given.unwrap_or_else(|| user_name(getuid())),
        }
    }

    /// Checks how a repository is named. Locations are private to this node: other agents name repositories by id.
    ///
    /// # Errors
    /// Usage, if not.
    pub(super) fn may_name(&self, named: Option<&str>) -> Result<(), Error> {
        match named {
            Some(named) if self.agent().is_some() && named.parse::<RepositoryId>().is_err() => {
                Err(Error::usage("repository is named by another agent, and not by its id").got(named))
            }
            _ => Ok(()),
        }
    }

    /// True if the caller may see and end `pin`: other agents only their own.
    pub(super) fn has(&self, pin: &Pin) -> bool {
        self.agent()
            .is_none_or(|caller| pin.owner.strip_prefix(&caller.path()).is_some_and(|rest| rest.starts_with('/')))
    }
}

/// Level of detail of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Only what anybody may know: whoever asks has shown nothing.
    Vitals,
    /// For another agent: no paths or locations of this node.
    Remote,
    /// Everything.
    All,
}

/// Credentials of a request on loopback.
#[derive(Debug)]
struct Token {
    hash: blake3::Hash,
    /// The file that tells it to whoever may read it.
    file: PathBuf,
}

/// Authentication and authorisation of requests.
#[derive(Debug)]
pub(super) struct Auth {
    /// Token that a request on loopback must show; without one, only what is open is answered there.
    token: Option<Token>,
    /// Agents that may call.
    callers: Callers,
    /// Name of this agent.
    own: String,
    /// True if any process of this machine may read the metrics.
    open_metrics: bool,
}

impl Auth {
    /// A auth that requires the token, given with its file, on loopback and admits `callers` from other nodes. `own` is this agent's
    /// identity, if it has a certificate.
    pub(super) fn new(token: Option<(&str, &Path)>, callers: Callers, own: Option<&Identity>) -> Self {
        let own = own.map_or_else(|| "here".to_owned(), Identity::path);
        let token = token.map(|(token, file)| Token { hash: blake3::hash(token.as_bytes()), file: file.to_owned() });
        Self { token, callers, own, open_metrics: false }
    }

    /// The same, and the figures are for anybody on this machine if `open`.
    pub(super) fn open_metrics(self, open: bool) -> Self {
        Self { open_metrics: open, ..self }
    }

    /// # Errors
    /// The fault of the request, if any.
    fn judge(
        &self,
        caller: &Caller,
        (method, path): (&Method, &str),
        headers: &HeaderMap,
    ) -> Result<Visibility, ApiError> {
        match caller {
            Caller::Socket(_) => Ok(Visibility::All),
            Caller::Loopback => self.judge_local(path, headers),
            Caller::Remote(caller) => {
                // Counted whatever it asks for, refused or not.
                caller.ask().map_err(|error| ApiError::new(StatusCode::TOO_MANY_REQUESTS, error))?;
                self.judge_call(caller.identity(), method, path)?;
                Ok(Visibility::Remote)
            }
        }
    }

    fn judge_call(&self, caller: &Identity, method: &Method, path: &str) -> Result<(), Error> {
        let (own, gives) = (&self.own, path.starts_with(HANDOFFS));
        if gives && !self.callers.to_give.include(caller) {
            let caller = caller.path();
            return Err(Error::denied(format!("agent {own} keeps nothing for {caller}"))
                .help(format!("add a [[handoff.accept]] entry with from = \"{caller}\" and names to its settings")));
        }
        if !gives && !self.callers.to_ask.include(caller) {
            let caller = caller.path();
            return Err(Error::denied(format!("agent {own} does not let {caller} ask it"))
                .help(format!("add callers = [\"{caller}\"] to its settings")));
        }
        if REMOTE.iter().any(|&(may, route)| may == method.as_str() && leads(path, route)) {
            return Ok(());
        }
        Err(Error::denied(format!("agent {own} does not serve this to other agents"))
            .at(format!("{method} {path}"))
            .help("ask it on its own node"))
    }

    fn judge_local(&self, path: &str, headers: &HeaderMap) -> Result<Visibility, ApiError> {
        // A rebound DNS name reaches this machine, but the browser still sends that name.
        if !headers.get(header::HOST).and_then(|host| host.to_str().ok()).is_some_and(is_loopback) {
            let error = Error::denied("request is for another host").expected("localhost, 127.0.0.1 or [::1]");
            return Err(ApiError::new(StatusCode::FORBIDDEN, error));
        }
        if self.is_shown(headers) {
            return Ok(Visibility::All);
        }
        // Another agent sees this agent's certificate, not the caller: that needs the token.
        let is_own = !headers.contains_key(AT);
        if is_own && (OPEN.contains(&path) || self.open_metrics && path == METRICS) {
            return Ok(Visibility::Vitals);
        }
        let file = self.token.as_ref().map_or_else(String::new, |token| {
            let file = token.file.display();
            format!("the token is in the file {file}, which changes when the agent starts; ")
        });
        let error = Error::denied("request shows no token, or a wrong one")
            .expected("Authorization: Bearer TOKEN")
            .help(format!("{file}the agent's socket needs none"));
        Err(ApiError::new(StatusCode::UNAUTHORIZED, error))
    }

    fn is_shown(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let shown =
            shown.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        // Hashes are compared in constant time.
        let expected = self.token.as_ref().map(|token| token.hash);
        shown.zip(expected).is_some_and(|((_, token), expected)| blake3::hash(token.trim().as_bytes()) == expected)
    }
}

/// Does `path` take `route`, in which a name in braces stands for one part?
fn leads(path: &str, route: &str) -> bool {
    let (mut parts, mut names) = (path.split('/'), route.split('/'));
    loop {
        match (parts.next(), names.next()) {
            (None, None) => return true,
            (Some(part), Some(name)) if part == name || name.starts_with('{') && !part.is_empty() => {}
            _ => return false,
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host.parse::<Authority>().is_ok_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host.host()))
}

/// Lets a request pass, or not.
pub(super) async fn check(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    mut request: Request,
    next: Next,
) -> Response {
    match auth.judge(&caller, (request.method(), request.uri().path()), request.headers()) {
        Ok(visibility) => {
            request.extensions_mut().insert(visibility);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::config::accepts;
    use crate::pattern::Patterns;

    fn judged(caller: &Caller, path: &str, headers: &[(header::HeaderName, &str)]) -> bool {
        let headers = &headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let auth = Auth::new(Some(("secret", Path::new("/run/agent.token"))), Callers::default(), None);
        auth.judge(caller, (&Method::GET, path), headers).is_ok()
    }

    /// Answer to `home/a` by an agent that lets `callers` ask.
    fn called(callers: &[&str], method: &Method, path: &str) -> Result<(), Error> {
        let agent = |site: &str, agent: &str| Identity::new(site, agent).unwrap();
        let to_ask = Agents::of(Patterns::of(callers).unwrap());
        let to_give = accepts("[[accept]]\nfrom = 'home/a'\nnames = '**'", 1).unwrap();
        let auth = Auth::new(
            Some(("secret", Path::new("/run/agent.token"))),
            Callers { to_ask, to_give },
            Some(&agent("cloud", "b")),
        );
        auth.judge_call(&agent("home", "a"), method, path)
    }

    #[test]
    fn loopback_wants_the_host_and_the_token() {
        use header::{AUTHORIZATION, HOST};
        assert!(judged(&Caller::Socket(getuid()), "/v1/pins", &[]));
        for host in ["localhost", "127.0.0.1:7070", "[::1]:7070"] {
            assert!(judged(&Caller::Loopback, "/health", &[(HOST, host)]), "{host}");
            assert!(judged(&Caller::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, "Bearer secret")]), "{host}");
            for shown in ["Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"] {
                assert!(!judged(&Caller::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, shown)]), "{shown}");
            }
            assert!(!judged(&Caller::Loopback, "/v1/pins", &[(HOST, host)]));
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:7070"] {
            assert!(!judged(&Caller::Loopback, "/health", &[(HOST, host)]), "{host}");
        }
        assert!(!judged(&Caller::Loopback, "/health", &[]));
        assert!(!judged(&Caller::Loopback, "/health/", &[(HOST, "localhost")]));
    }

    #[test]
    fn without_the_token_only_what_is_vital_is_told() {
        let visibility_of = |auth: &Auth, path: &str, token: Option<&str>| {
            let headers = [(header::HOST, Some("localhost")), (header::AUTHORIZATION, token)];
            let headers = headers.into_iter().filter_map(|(name, value)| Some((name, value?.parse().unwrap())));
            auth.judge(&Caller::Loopback, (&Method::GET, path), &headers.collect()).ok()
        };
        let auth = || Auth::new(Some(("secret", Path::new("/run/agent.token"))), Callers::default(), None);
        let (closed, open) = (auth(), auth().open_metrics(true));
        for path in ["/health", "/ready"] {
            assert_eq!(visibility_of(&closed, path, None), Some(Visibility::Vitals));
            assert_eq!(visibility_of(&closed, path, Some("Bearer wrong")), Some(Visibility::Vitals));
            assert_eq!(visibility_of(&closed, path, Some("Bearer secret")), Some(Visibility::All));
        }
        assert_eq!(visibility_of(&closed, "/metrics", None), None);
        assert_eq!(visibility_of(&closed, "/metrics", Some("Bearer secret")), Some(Visibility::All));
        assert!(visibility_of(&open, "/metrics", None).is_some() && visibility_of(&open, "/v1/pins", None).is_none());
    }

    #[test]
    fn without_a_token_nothing_is_let_through() {
        let headers = [(header::HOST, "localhost"), (header::AUTHORIZATION, "Bearer ")];
        let headers = headers.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect();
        assert!(Auth::new(None, Callers::default(), None).judge_local("/v1/pins", &headers).is_err());
    }

    #[test]
    fn who_calls_must_be_listed() {
        let warm = "/v1/warm";
        for callers in [&[][..], &["home/b", "homer/*", "cloud/*"]] {
            let error = called(callers, &Method::POST, warm).unwrap_err();
            assert_eq!(error.to_string(), "agent cloud/b does not let home/a ask it");
            assert_eq!(error.help_text(), Some("add callers = [\"home/a\"] to its settings"));
            assert!(called(callers, &Method::GET, "/health").is_err());
        }
        assert!(called(&[], &Method::POST, HANDOFFS).is_ok(), "who may give need not be able to ask");
        let to_ask = Agents::of(Patterns::of(&["**"]).unwrap());
        let auth = Auth::new(None, Callers { to_ask, ..Callers::default() }, None);
        let error = auth.judge_call(&Identity::new("home", "a").unwrap(), &Method::POST, HANDOFFS).unwrap_err();
        assert_eq!(error.to_string(), "agent here keeps nothing for home/a");
        let help = "add a [[handoff.accept]] entry with from = \"home/a\" and names to its settings";
        assert_eq!(error.help_text(), Some(help));
        for callers in [&["home/a"][..], &["home/*"], &["x/y", "**"]] {
            assert!(called(callers, &Method::POST, warm).is_ok(), "{callers:?}");
        }
    }

    #[test]
    fn who_calls_may_not_touch_files() {
        let all = [Method::GET, Method::POST, Method::DELETE, Method::PUT, Method::HEAD];
        for (path, methods, _) in super::super::routes() {
            for method in &all {
                let may = called(&["**"], method, path).is_ok();
                assert_eq!(may, REMOTE.contains(&(method.as_str(), path)), "{method} {path}");
                assert!(!may || methods.contains(method), "{method} {path} is not served");
            }
        }
        let denied = ["/v1/save", "/v1/restore", "/v1/cache/evict", "/v1/cache/check"];
        assert!(denied.iter().all(|path| called(&["**"], &Method::POST, path).is_err()));
        let denied =
            ["/v1/files/run/a", "/v1/chunks", "/v1/ledger", "/metrics", "/v1/none", "/", "", "/health/", "/v1/pins/"];
        assert!(denied.iter().all(|path| called(&["**"], &Method::GET, path).is_err()));
        for path in ["/v1/tasks/a/b", "/v1/tasks//events", "/v1/tasks/a/events/", "//v1/tasks"] {
            assert!(called(&["**"], &Method::GET, path).is_err(), "{path}");
        }
        assert!(called(&["**"], &Method::GET, "/v1/tasks/01KB/events").is_ok());
    }

    #[test]
    fn pins_of_another_agent_are_its_own() {
        let caller =
            |site: &str, agent: &str| Caller::Remote(RemoteCaller::uncounted(Identity::new(site, agent).unwrap()));
        let pin = |owner: &str| Pin {
            id: crate::id::PinId::random(),
            owner: owner.to_owned(),
            reason: String::new(),
            created: crate::clock::Timestamp(0),
            expires: None,
            chunks: 0,
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
