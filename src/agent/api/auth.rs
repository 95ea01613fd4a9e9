//! Authentication and authorisation of API requests. Three listeners: the Unix socket, which only the agent's user (and root)
//! can open; loopback, where any process can connect and a browser can be made to; the port for peers, where agents of the
//! authority call.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::answers::counted;
use super::caller::Caller;
use super::ending::cut_off;
use super::error::{ApiError, redacted};
use super::recorded::{check_rate, refuse_call};
use super::rights::{Need, matches_route, need};
use super::slots::with_guard;
use crate::agent::AT;
use crate::agent::config::Accepts;
use crate::agent::page::is_page;
use crate::agent::state::AgentState;
use crate::agent::tokens::{Grant, RequestSlot, Tokens, not_valid};
use crate::error::Error;
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::policy::Callers as Agents;

/// Paths that need no token on loopback: liveness and readiness without details, and the API's description.
pub(super) const OPEN: [&str; 3] = ["/health", "/ready", "/openapi.json"];
/// Path that needs no token on loopback if [`OpenPaths::metrics`] is set.
const METRICS: &str = "/metrics";
/// Paths that need none if [`OpenPaths::kube`] is set: a scheduler cannot send one.
const KUBE: [&str; 2] = ["/kube/filter", "/kube/prioritize"];
/// Path that needs none if [`OpenPaths::skypilot`] is set.
const SKYPILOT: &str = "/skypilot";
/// Limit of log lines about invalid tokens.
static WRONG_TOKENS: LogLimit = LogLimit::new();

/// Routes that other agents may use: to fetch and pin chunks on this node and follow the task; with handoff rights, to hand off
/// checkpoints. None of them reads or writes the node's files, or tasks of others.
pub(super) const REMOTE: [(&str, &str); 21] = [
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
    ("POST", "/v1/hints"),
    ("POST", "/v1/hints/{id}/commit"),
    ("GET", "/v1/hints/{id}"),
    ("POST", "/v1/hints/{id}/outcome"),
    ("PUT", "/v1/audit/heads"),
    ("GET", HANDOFFS),
    ("POST", HANDOFFS),
    ("PUT", "/v1/handoffs/{id}"),
    ("DELETE", "/v1/handoffs/{id}"),
];
pub(super) const HANDOFFS: &str = "/v1/handoffs";

/// Other agents that may call.
#[derive(Clone, Debug, Default)]
pub(in crate::agent) struct Callers {
    /// Callers of all routes of [`REMOTE`] except handoff and metrics.
    pub(in crate::agent) api_clients: Agents,
    /// Callers of the handoff routes.
    pub(in crate::agent) handoff_senders: Accepts,
    /// Callers of [`METRICS`].
    pub(in crate::agent) scrapers: Agents,
}

/// Level of detail of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Only liveness and readiness, for unauthenticated clients.
    HealthSummary,
    /// No paths or locations of this node, for other agents and tokens.
    Remote,
    /// Everything.
    All,
}

/// Credentials of a request on loopback.
#[derive(Debug)]
struct Token {
    hash: blake3::Hash,
    /// File that holds the token, for the error message.
    file: PathBuf,
}

/// Authentication and authorisation of requests.
#[derive(Debug)]
pub(super) struct Auth {
    /// Token for requests on loopback; without one, only open paths are served there.
    token: Option<Token>,
    /// Other agents that may call.
    callers: Callers,
    /// Name of this agent, for error messages.
    own: String,
    open: OpenPaths,
    /// Tokens with limited rights.
    tokens: Option<Arc<Tokens>>,
}

/// Paths that any process of this machine may use, beside those that always are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct OpenPaths {
    pub(in crate::agent) metrics: bool,
    /// Paths of a scheduler extender.
    pub(in crate::agent) kube: bool,
    /// Path of an admin policy of `SkyPilot`.
    pub(in crate::agent) skypilot: bool,
}

/// An authorised request.
#[derive(Debug)]
struct Authorized {
    visibility: Visibility,
    /// Token of the request, if it can be revoked.
    grant: Option<Arc<Grant>>,
    /// Permit among the concurrent requests of tokens.
    request_slot: Option<RequestSlot>,
}

impl From<Visibility> for Authorized {
    fn from(visibility: Visibility) -> Self {
        Self { visibility, grant: None, request_slot: None }
    }
}

impl Auth {
    /// Authorisation that requires `token` (given with its file) on loopback and admits `callers` from other nodes. `own` is
    /// this agent's identity, if it has a certificate.
    pub(super) fn new(token: Option<(&str, &Path)>, callers: Callers, own: Option<&Identity>) -> Self {
        let own = own.map_or_else(|| "here".to_owned(), Identity::path);
        let token = token.map(|(token, file)| Token { hash: blake3::hash(token.as_bytes()), file: file.to_owned() });
        Self { token, callers, own, open: OpenPaths::default(), tokens: None }
    }

    /// Sets the paths that need no token on loopback.
    pub(super) fn open(self, open: OpenPaths) -> Self {
        Self { open, ..self }
    }

    /// Also admits `tokens` on loopback, each with its rights.
    pub(super) fn tokens(self, tokens: Option<Arc<Tokens>>) -> Self {
        Self { tokens, ..self }
    }

    /// Authorises a request.
    ///
    /// # Errors
    /// The reason of a refusal.
    fn authorize(
        &self,
        caller: &Caller,
        (method, path): (&Method, &str),
        headers: &HeaderMap,
    ) -> Result<Authorized, ApiError> {
        match caller {
            Caller::Socket(_) => check_page(headers).map(|()| Visibility::All.into()),
            Caller::Loopback | Caller::Admin(_) | Caller::Token(_) => self.authorize_loopback((method, path), headers),
            Caller::Remote(caller) => {
                // Counts every call against the limit, even a refused one.
                caller.admit_request().map_err(|error| ApiError::new(StatusCode::TOO_MANY_REQUESTS, error))?;
                self.authorize_remote(caller.identity(), method, path)?;
                Ok(Visibility::Remote.into())
            }
        }
    }

    fn authorize_remote(&self, caller: &Identity, method: &Method, path: &str) -> Result<(), Error> {
        let (own, gives) = (&self.own, path.starts_with(HANDOFFS));
        if (method, path) == (&Method::GET, METRICS) {
            let refused = || {
                let caller = caller.path();
                Error::denied(format!("agent {own} lets {caller} read no metrics"))
                    .help(format!("add scrapers = [\"{caller}\"] to its settings"))
            };
            return if self.callers.scrapers.include(caller) { Ok(()) } else { Err(refused()) };
        }
        if gives && !self.callers.handoff_senders.include(caller) {
            let caller = caller.path();
            return Err(Error::denied(format!("agent {own} accepts no handoffs of {caller}"))
                .help(format!("add a [[handoff.accept]] entry with from = \"{caller}\" and names to its settings")));
        }
        if !gives && !self.callers.api_clients.include(caller) {
            let caller = caller.path();
            return Err(Error::denied(format!("agent {own} accepts no requests of {caller}"))
                .help(format!("add callers = [\"{caller}\"] to its settings")));
        }
        if REMOTE.iter().any(|&(may, route)| may == method.as_str() && matches_route(path, route)) {
            return Ok(());
        }
        Err(Error::denied(format!("agent {own} does not serve this to other agents"))
            .at(format!("{method} {path}"))
            .help("use its API on its own node"))
    }

    fn authorize_loopback(&self, (method, path): (&Method, &str), headers: &HeaderMap) -> Result<Authorized, ApiError> {
        // Protects against DNS rebinding: the rebound name resolves to this machine, but the browser sends it as the host.
        let mut hosts = headers.get_all(header::HOST).iter();
        let only = hosts.next().filter(|_| hosts.next().is_none());
        if !only.and_then(|host| host.to_str().ok()).is_some_and(is_loopback) {
            let error =
                Error::denied("request has the host name of another machine").expected("localhost, 127.0.0.1 or [::1]");
            return Err(ApiError::new(StatusCode::FORBIDDEN, error));
        }
        let shown = shown(headers);
        // Hashes are compared in constant time.
        let is_own_token =
            |shown: &str| self.token.as_ref().is_some_and(|token| token.hash == blake3::hash(shown.as_bytes()));
        if shown.is_some_and(is_own_token) {
            return Ok(Visibility::All.into());
        }
        let grant = shown.zip(self.tokens.as_ref()).and_then(|(shown, tokens)| Some((tokens, tokens.find(shown)?)));
        if let Some((_, grant)) = &grant
            && grant.scopes().is_admin()
        {
            return Ok(Authorized { visibility: Visibility::All, grant: Some(Arc::clone(grant)), request_slot: None });
        }
        // A forwarded request is authenticated by this agent's certificate, so it needs the token here.
        let is_own = !headers.contains_key(AT);
        let open = self.open;
        let needs_none = OPEN.contains(&path)
            || is_page(path)
            || open.metrics && path == METRICS
            || open.kube && KUBE.contains(&path)
            || open.skypilot && path == SKYPILOT;
        if is_own && needs_none {
            return Ok(Visibility::HealthSummary.into());
        }
        if let Some((tokens, grant)) = grant {
            check_scope(&grant, need(method, path))?;
            let request_slot =
                tokens.begin_request(&grant).map_err(|error| ApiError::new(StatusCode::TOO_MANY_REQUESTS, error))?;
            return Ok(Authorized {
                visibility: Visibility::Remote,
                grant: Some(grant),
                request_slot: Some(request_slot),
            });
        }
        if shown.is_some()
            && let Some(kept_back) = WRONG_TOKENS.may()
        {
            tracing::warn!(kept_back, "a request on loopback has an invalid token");
        }
        Err(self.no_token())
    }

    /// Response to a request without a valid token: the same for an unknown, an expired and a revoked token.
    fn no_token(&self) -> ApiError {
        let file = self.token.as_ref().map_or_else(String::new, |token| {
            let file = token.file.display();
            format!("the token is in the file {file}, which changes when the agent starts; ")
        });
        let error = not_valid().help(format!("{file}the agent's socket needs no token"));
        ApiError::new(StatusCode::UNAUTHORIZED, error)
    }
}

/// Token of a request, which may end while the body arrives.
#[derive(Clone, Debug)]
pub(super) struct ShownToken {
    auth: Arc<Auth>,
    grant: Arc<Grant>,
}

impl ShownToken {
    /// Checks that it still holds.
    ///
    /// # Errors
    /// The answer to an unknown token, if it has ended.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        match &self.auth.tokens {
            Some(tokens) if !tokens.is_over(&self.grant) => Ok(()),
            _ => Err(self.auth.no_token()),
        }
    }
}

/// Token of a request, if it has one.
fn shown(headers: &HeaderMap) -> Option<&str> {
    let shown = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = shown.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Checks that a token has the scope that a route needs.
///
/// # Errors
/// Denied, if it does not.
pub(super) fn check_scope(grant: &Grant, need: Need) -> Result<(), Error> {
    match need {
        Need::Scope(scope) if !grant.scopes().has(scope) => {
            Err(Error::denied(format!("token lacks the scope `{}`", scope.word()))
                .help("the agent's user can create a token with it: towline token new"))
        }
        Need::Scope(_) | Need::Own | Need::Nothing => Ok(()),
    }
}

/// Checks that a request at the socket comes from no web page but the agent's own. A browser reaches the socket if it is forwarded to a
/// port (`ssh -L PORT:SOCKET`). Names of other sites may resolve to this machine then, and a page of theirs has no mark but its host:
/// browsers tell who asks only where that is trustworthy (<https://www.w3.org/TR/fetch-metadata/#sec-metadata-infra>).
fn check_page(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let refused = || {
        let error = Error::denied("requests of web pages are not answered");
        Err(error.help("only those of the agent's own page; other clients name the host localhost").into())
    };
    let host = text(header::HOST);
    // Other clients name what they like, but no site of the internet is called by one word.
    let is_here = host.is_none_or(|host| is_loopback(host) || !host.contains(['.', ':', '@']));
    if !is_here || headers.get_all(header::HOST).iter().count() > 1 {
        return refused();
    }
    let (site, origin) = (text(HeaderName::from_static("sec-fetch-site")), text(header::ORIGIN));
    let is_own_site = site.is_none_or(|site| ["same-origin", "none"].contains(&site));
    let is_own_origin = origin.is_none_or(|origin| origin.strip_prefix("http://") == host);
    if is_own_site && is_own_origin { Ok(()) } else { refused() }
}

/// True for the name or an address of this machine, with or without a port.
pub(in crate::agent) fn is_loopback(host: &str) -> bool {
    let local = |host: Authority| ["localhost", "127.0.0.1", "[::1]"].contains(&host.host());
    !host.contains('@') && host.parse::<Authority>().is_ok_and(local)
}

/// Middleware that authorises each request.
pub(super) async fn check(
    State((auth, state)): State<(Arc<Auth>, Arc<AgentState>)>,
    Extension(caller): Extension<Caller>,
    mut request: Request,
    next: Next,
) -> Response {
    match auth.authorize(&caller, (request.method(), request.uri().path()), request.headers()) {
        Ok(Authorized { visibility, grant, request_slot }) => {
            request.extensions_mut().insert(visibility);
            let caller = match &grant {
                Some(grant) if grant.scopes().is_admin() => Caller::Admin(Arc::clone(grant)),
                Some(grant) => Caller::Token(Arc::clone(grant)),
                None => caller,
            };
            if let Err(error) = check_rate(&state, &caller, request.method(), request.uri().path()) {
                return error.into_response();
            }
            let limited = caller.limited();
            request.extensions_mut().insert(caller);
            if let Some(grant) = grant.clone() {
                request.extensions_mut().insert(ShownToken { auth: Arc::clone(&auth), grant });
            }
            let response = next.run(request).await;
            let response = match limited {
                Some(limited) => counted(response, &state.answers, &limited).await,
                None => response,
            };
            let response = if visibility == Visibility::Remote { redacted(response) } else { response };
            let response = match (grant, &auth.tokens) {
                (Some(grant), Some(tokens)) => cut_off(response, tokens.ended(grant)),
                _ => response,
            };
            if let Some(request_slot) = request_slot { with_guard(response, request_slot) } else { response }
        }
        Err(error) => {
            let called = (request.method(), request.uri().path());
            refuse_call(&state, &caller, called, error).await.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::process::getuid;

    use super::super::tests::described;
    use super::*;
    use crate::agent::config::accepts;
    use crate::agent::tokens::TokenSpec;
    use crate::clock::{ManualClock, Timestamp};
    use crate::pattern::Patterns;
    use crate::policy::Scopes;

    fn authorized(caller: &Caller, path: &str, headers: &[(HeaderName, &str)]) -> bool {
        let headers = &headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let auth = Auth::new(Some(("secret", Path::new("/run/agent.token"))), Callers::default(), None);
        auth.authorize(caller, (&Method::GET, path), headers).is_ok()
    }

    /// Answer to `home/a` by an agent that lets `callers` ask.
    fn called(callers: &[&str], method: &Method, path: &str) -> Result<(), Error> {
        let agent = |site: &str, agent: &str| Identity::new(site, agent).unwrap();
        let api_clients = Agents::of(Patterns::of(callers).unwrap());
        let handoff_senders = accepts("[[accept]]\nfrom = 'home/a'\nnames = '**'", 1).unwrap();
        let auth = Auth::new(
            Some(("secret", Path::new("/run/agent.token"))),
            Callers { api_clients, handoff_senders, scrapers: Agents::default() },
            Some(&agent("cloud", "b")),
        );
        auth.authorize_remote(&agent("home", "a"), method, path)
    }

    #[test]
    fn loopback_wants_the_host_and_the_token() {
        use header::{AUTHORIZATION, HOST};
        assert!(authorized(&Caller::Socket(getuid()), "/v1/pins", &[]));
        for host in ["localhost", "127.0.0.1:7070", "[::1]:7070"] {
            assert!(authorized(&Caller::Loopback, "/health", &[(HOST, host)]), "{host}");
            assert!(
                authorized(&Caller::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, "Bearer secret")]),
                "{host}"
            );
            for shown in ["Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"] {
                assert!(!authorized(&Caller::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, shown)]), "{shown}");
            }
            assert!(!authorized(&Caller::Loopback, "/v1/pins", &[(HOST, host)]));
        }
        let two = [(HOST, "localhost"), (HOST, "evil.example")];
        let mut both = HeaderMap::new();
        for (name, value) in two {
            both.append(name, value.parse().unwrap());
        }
        let auth = Auth::new(Some(("secret", Path::new("/run/agent.token"))), Callers::default(), None);
        assert!(auth.authorize(&Caller::Loopback, (&Method::GET, "/health"), &both).is_err(), "one host");
        for host in
            ["x@localhost", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:7070"]
        {
            assert!(!authorized(&Caller::Loopback, "/health", &[(HOST, host)]), "{host}");
        }
        assert!(!authorized(&Caller::Loopback, "/health", &[]));
        assert!(!authorized(&Caller::Loopback, "/health/", &[(HOST, "localhost")]));
    }

    #[test]
    fn a_web_page_cannot_use_a_forwarded_socket() {
        let (site, socket) = (HeaderName::from_static("sec-fetch-site"), Caller::Socket(getuid()));
        let asks = |headers: &[(HeaderName, &str)]| authorized(&socket, "/v1/pins", headers);
        let here = (header::HOST, "localhost:7170");
        assert!(asks(&[(header::HOST, "agent")]), "no browser");
        assert!(asks(&[here.clone(), (site.clone(), "none")]), "an address that was typed");
        assert!(asks(&[here.clone(), (site.clone(), "same-origin"), (header::ORIGIN, "http://localhost:7170")]));
        for headers in [
            [here.clone(), (site.clone(), "cross-site"), (header::ORIGIN, "https://evil.example")],
            [here.clone(), (site.clone(), "same-site"), (header::ORIGIN, "http://localhost:9999")],
            [(header::HOST, "evil.example"), (site.clone(), "same-origin"), (header::ORIGIN, "http://evil.example")],
        ] {
            assert!(!asks(&headers), "{headers:?}");
        }
        assert!(!asks(&[here, (header::ORIGIN, "null")]), "an old browser");
        for rebound in ["evil.example", "evil.example:8000", "10.0.0.1", "[fe80::1]:80", "x@localhost", "a:80"] {
            assert!(!asks(&[(header::HOST, rebound)]), "{rebound}: it has no other mark");
        }
        let mut both = HeaderMap::new();
        both.append(header::HOST, HeaderValue::from_static("localhost"));
        both.append(header::HOST, HeaderValue::from_static("evil"));
        assert!(check_page(&both).is_err() && check_page(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn without_the_token_only_what_is_vital_is_told() {
        let visibility_of = |auth: &Auth, path: &str, token: Option<&str>| {
            let headers = [(header::HOST, Some("localhost")), (header::AUTHORIZATION, token)];
            let headers = headers.into_iter().filter_map(|(name, value)| Some((name, value?.parse().unwrap())));
            let authorized = auth.authorize(&Caller::Loopback, (&Method::GET, path), &headers.collect());
            authorized.ok().map(|authorized| authorized.visibility)
        };
        let auth = || Auth::new(Some(("secret", Path::new("/run/agent.token"))), Callers::default(), None);
        let (closed, open) = (auth(), auth().open(OpenPaths { metrics: true, ..OpenPaths::default() }));
        for path in ["/health", "/ready"] {
            assert_eq!(visibility_of(&closed, path, None), Some(Visibility::HealthSummary));
            assert_eq!(visibility_of(&closed, path, Some("Bearer wrong")), Some(Visibility::HealthSummary));
            assert_eq!(visibility_of(&closed, path, Some("Bearer secret")), Some(Visibility::All));
        }
        assert_eq!(visibility_of(&closed, "/metrics", None), None);
        assert_eq!(visibility_of(&closed, "/metrics", Some("Bearer secret")), Some(Visibility::All));
        assert!(visibility_of(&open, "/metrics", None).is_some() && visibility_of(&open, "/v1/pins", None).is_none());
    }

    #[test]
    fn a_token_is_judged_by_its_scopes_and_one_that_ended_as_an_unknown_one() {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at(Timestamp(0)));
        let tokens = Tokens::open(&dir.path().join("tokens"), Arc::<ManualClock>::clone(&clock)).unwrap();
        let tokens = Arc::new(tokens);
        let make = |scopes: &[&str], lasting| {
            let spec = TokenSpec { scopes: Scopes::of(scopes).unwrap(), name: None, tenant: None, lasting };
            tokens.make(None, spec).unwrap().secret
        };
        let hour = Duration::from_hours(1);
        let (reads, admin) = (make(&["read=**"], Some(hour)), make(&["admin"], None));
        let auth = Auth::new(Some(("own", Path::new("/run/agent.token"))), Callers::default(), None);
        let auth = auth.tokens(Some(Arc::clone(&tokens)));
        let ask = |method: Method, path: &str, token: &str| {
            let headers = [(header::HOST, "localhost".to_owned()), (header::AUTHORIZATION, format!("Bearer {token}"))];
            let headers = headers.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect();
            let authorized = auth.authorize(&Caller::Loopback, (&method, path), &headers);
            authorized.map(|authorized| authorized.visibility).map_err(|error| format!("{error:?}"))
        };
        assert_eq!(ask(Method::GET, "/v1/names", &reads), Ok(Visibility::Remote));
        assert_eq!(ask(Method::HEAD, "/v1/files/a/b", &reads), Ok(Visibility::Remote));
        assert_eq!(ask(Method::GET, "/health", &reads), Ok(Visibility::HealthSummary));
        for (method, path) in [
            (Method::POST, "/v1/restore"),
            (Method::POST, "/v1/tokens"),
            (Method::GET, "/metrics"),
            (Method::POST, "/v1/names"),
            (Method::GET, "/v1/none"),
        ] {
            let refused = ask(method.clone(), path, &reads).unwrap_err();
            assert!(refused.contains("token lacks the scope"), "{method} {path} {refused}");
            assert_eq!(ask(method, path, &admin), Ok(Visibility::All), "{path}");
        }
        clock.set(Timestamp(i64::try_from(hour.as_nanos()).unwrap()));
        let unknown = ask(Method::GET, "/v1/names", "towline_unknown");
        assert_eq!(ask(Method::GET, "/v1/names", &reads), unknown);
        tokens.revoke(&tokens.list()[1].id).unwrap();
        assert_eq!(ask(Method::GET, "/v1/names", &admin), unknown);
        assert!(unknown.is_err());
    }

    #[test]
    fn without_a_token_nothing_is_let_through() {
        let headers = [(header::HOST, "localhost"), (header::AUTHORIZATION, "Bearer ")];
        let headers = headers.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect();
        assert!(
            Auth::new(None, Callers::default(), None).authorize_loopback((&Method::GET, "/v1/pins"), &headers).is_err()
        );
    }

    #[test]
    fn who_calls_must_be_listed() {
        let warm = "/v1/warm";
        for callers in [&[][..], &["home/b", "homer/*", "cloud/*"]] {
            let error = called(callers, &Method::POST, warm).unwrap_err();
            assert_eq!(error.to_string(), "agent cloud/b accepts no requests of home/a");
            assert_eq!(error.help_text(), Some("add callers = [\"home/a\"] to its settings"));
            assert!(called(callers, &Method::GET, "/health").is_err());
        }
        assert!(called(&[], &Method::POST, HANDOFFS).is_ok(), "who may give need not be able to ask");
        let api_clients = Agents::of(Patterns::of(&["**"]).unwrap());
        let auth = Auth::new(None, Callers { api_clients, ..Callers::default() }, None);
        let error = auth.authorize_remote(&Identity::new("home", "a").unwrap(), &Method::POST, HANDOFFS).unwrap_err();
        assert_eq!(error.to_string(), "agent here accepts no handoffs of home/a");
        let help = "add a [[handoff.accept]] entry with from = \"home/a\" and names to its settings";
        assert_eq!(error.help_text(), Some(help));
        for callers in [&["home/a"][..], &["home/*"], &["x/y", "**"]] {
            assert!(called(callers, &Method::POST, warm).is_ok(), "{callers:?}");
        }
    }

    #[test]
    fn a_scraper_reads_the_metrics_and_nothing_else() {
        let scrapers = Agents::of(Patterns::of(&["home/prometheus"]).unwrap());
        let auth = Auth::new(None, Callers { scrapers, ..Callers::default() }, None);
        let scraper = Identity::new("home", "prometheus").unwrap();
        assert!(auth.authorize_remote(&scraper, &Method::GET, METRICS).is_ok());
        for (method, path) in [
            (Method::POST, METRICS),
            (Method::GET, "/health"),
            (Method::GET, "/metrics/"),
            (Method::GET, "/v1/peers"),
            (Method::POST, "/v1/warm"),
        ] {
            assert!(auth.authorize_remote(&scraper, &method, path).is_err(), "{method} {path}");
        }
        let error = called(&["**"], &Method::GET, METRICS).unwrap_err();
        assert_eq!(error.to_string(), "agent cloud/b lets home/a read no metrics");
        assert_eq!(error.help_text(), Some("add scrapers = [\"home/a\"] to its settings"));
    }

    #[test]
    fn who_calls_may_not_touch_files() {
        let all = [Method::GET, Method::POST, Method::DELETE, Method::PUT, Method::HEAD];
        let described = described();
        for path in described["paths"].as_object().unwrap().keys() {
            for method in &all {
                let may = called(&["**"], method, path).is_ok();
                assert_eq!(may, REMOTE.contains(&(method.as_str(), path)), "{method} {path}");
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
}
