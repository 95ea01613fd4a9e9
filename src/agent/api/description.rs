//! Description of the API (<https://spec.openapis.org/oas/v3.1.0>): what its handlers and types say, and what holds for all of them.

use std::sync::LazyLock;

use utoipa::Modify;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::header::Header;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn, PathItem};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{Object, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Required};

use super::auth::{HANDOFFS, OPEN, REMOTE};
use super::rights::{NEEDS, Need};
use super::routes;
use crate::agent::view::{Failed, Failure};

/// The API, described as JSON.
pub(super) static DESCRIPTION: LazyLock<String> = LazyLock::new(|| {
    let mut described = routes().into_openapi();
    Shared.modify(&mut described);
    // Strings, numbers and lists of them are always JSON.
    described.to_pretty_json().unwrap_or_default()
});

/// Frame of the description, and the schemas that no handler names.
#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Towline agent", version = "1", license(name = "Apache-2.0", identifier = "Apache-2.0")),
    servers((url = "http://localhost")),
    security(("token" = [])),
    components(schemas(Failed, Failure))
)]
pub(super) struct Base;

const ABOUT: &str = "\
The API of a node's agent, on its Unix socket and, if configured, on loopback. On loopback every path except /health, /ready and \
/openapi.json needs the token in the file beside the socket; without it /health and /ready return only whether the agent is alive \
and ready. With the setting `open_metrics` /metrics needs no token either. Tokens of `towline token new` have scopes: \
`x-towline-scope` is the scope that an operation needs (`own`: any token, for the tasks that it started). A name that a token may \
not read is reported as absent. With the header Towline-At (SITE or SITE/AGENT) a request is forwarded to another agent; the \
response has the same header with the SITE/AGENT that answered. On the port for peers, over mutual TLS with ALPN http/1.1, agents \
that the setting `callers` lists (for handoffs, `[[handoff.accept]]`) may use the operations marked `x-towline-remote`.";

/// Name of the header that routes a request to another agent, and of the parameter.
const AT: &str = "Towline-At";
const AT_ABOUT: &str = "\
Agent to forward the request to: SITE/AGENT, or SITE for one of its agents, always the same for a name. Not in requests of other \
agents.";
const TOKEN_ABOUT: &str = "\
On loopback: the content of the file .token beside the socket, with all rights, or a token of `towline token new`, with its scopes. The \
socket needs no token.";
const BUSY_ABOUT: &str = "\
Another agent makes too many calls, or has too many connections: the limits are in `[admission]` of the called agent. Never for \
the agent's own node.";

/// Adds what many operations share: errors, the rights of other agents, the token.
struct Shared;

impl Modify for Shared {
    fn modify(&self, described: &mut OpenApi) {
        described.info.description = Some(ABOUT.to_owned());
        if let Some(components) = &mut described.components {
            let mut token = Http::new(HttpAuthScheme::Bearer);
            token.description = Some(TOKEN_ABOUT.to_owned());
            components.add_security_scheme("token", SecurityScheme::Http(token));
            components.responses.insert("Busy".to_owned(), RefOr::T(busy()));
        }
        let paths = std::mem::take(&mut described.paths.paths);
        for (path, mut item) in paths {
            for (method, operation) in operations(&mut item) {
                shared(operation, method, &path);
            }
            // As axum has it, the last part may hold slashes.
            described.paths.paths.insert(path.replace("{*", "{"), item);
        }
    }
}

/// The operations of a path, by method.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let PathItem { get, put, post, delete, .. } = item;
    let all = [("GET", get), ("PUT", put), ("POST", post), ("DELETE", delete)];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

fn shared(operation: &mut Operation, method: &'static str, path: &str) {
    let responses = &mut operation.responses.responses;
    responses.insert("default".to_owned(), RefOr::T(failed("It failed")));
    if OPEN.contains(&path) {
        operation.security = Some(Vec::<SecurityRequirement>::new());
    }
    let mut extensions = Extensions::builder();
    if let Some(scope) = scope(method, path) {
        extensions = extensions.add("x-towline-scope", scope);
    }
    let is_remote = REMOTE.contains(&(method, path));
    if is_remote {
        extensions = extensions.add("x-towline-remote", true);
    }
    operation.extensions = Some(extensions.build());
    if !is_remote {
        return;
    }
    responses.insert("429".to_owned(), RefOr::Ref(Ref::from_response_name("Busy")));
    // Only other agents hand off.
    if method == "GET" || !path.starts_with(HANDOFFS) {
        operation.parameters.get_or_insert_default().push(RefOr::T(at()));
    }
}

/// Scope that an operation needs of a token, as it is described; None, if it is open.
fn scope(method: &str, path: &str) -> Option<&'static str> {
    let path = path.replace("{*", "{");
    let (_, _, need) = NEEDS.iter().find(|(of, route, _)| *of == method && *route == path)?;
    match need {
        Need::Nothing => None,
        Need::Own => Some("own"),
        Need::Scope(scope) => Some(scope.word()),
    }
}

fn at() -> Parameter {
    let mut at = Parameter::new(AT);
    at.parameter_in = ParameterIn::Header;
    at.required = Required::False;
    at.description = Some(AT_ABOUT.to_owned());
    at.schema = Some(Object::with_type(Type::String).into());
    at
}

fn failed(about: &str) -> Response {
    let body = Content::new(Some(Ref::from_schema_name("Failed")));
    ResponseBuilder::new().description(about).content("application/json", body).build()
}

fn busy() -> Response {
    let mut retry_after = Header::new(Object::with_type(Type::Integer));
    retry_after.description = Some("Seconds until it may try again".to_owned());
    let mut busy = failed(BUSY_ABOUT);
    busy.headers.insert("Retry-After".to_owned(), RefOr::T(retry_after));
    busy
}
