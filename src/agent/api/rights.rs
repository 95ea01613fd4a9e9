//! Scope that each route needs of a token, beside the table of routes in `mod.rs`. Names, paths and owners are checked by the handlers.

use axum::http::Method;

use crate::policy::Scope;

/// Right that a token must have for a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// None: any process of this machine may send it.
    Nothing,
    /// Any token, for the tasks that it started itself.
    Own,
    /// A scope.
    Scope(Scope),
}

const READ: Need = Need::Scope(Scope::Read);
const SAVE: Need = Need::Scope(Scope::Save);
const WARM: Need = Need::Scope(Scope::Warm);
const PINS: Need = Need::Scope(Scope::Pins);
const METRICS: Need = Need::Scope(Scope::Metrics);
const ADMIN: Need = Need::Scope(Scope::Admin);

/// Routes with the right that each needs. A route without an entry needs `admin`; a test checks that every route has one.
pub(super) const NEEDS: [(&str, &str, Need); 52] = [
    ("GET", "/health", Need::Nothing),
    ("GET", "/ready", Need::Nothing),
    ("GET", "/openapi.json", Need::Nothing),
    ("GET", "/metrics", METRICS),
    ("POST", "/v1/save", SAVE),
    // It writes to any path that the request names.
    ("POST", "/v1/restore", ADMIN),
    ("POST", "/v1/fetch", WARM),
    ("POST", "/v1/warm", WARM),
    ("GET", "/v1/tasks", Need::Own),
    ("GET", "/v1/tasks/{id}", Need::Own),
    ("DELETE", "/v1/tasks/{id}", Need::Own),
    ("GET", "/v1/tasks/{id}/events", Need::Own),
    ("GET", "/v1/pins", PINS),
    ("POST", "/v1/pins", PINS),
    ("DELETE", "/v1/pins/{id}", PINS),
    ("GET", "/v1/cache", METRICS),
    ("POST", "/v1/cache/check", ADMIN),
    ("POST", "/v1/cache/evict", ADMIN),
    ("GET", "/v1/handoffs", ADMIN),
    ("POST", "/v1/handoffs", ADMIN),
    ("PUT", "/v1/handoffs/{id}", ADMIN),
    ("DELETE", "/v1/handoffs/{id}", ADMIN),
    ("POST", "/v1/handoffs/{id}/retry", ADMIN),
    // Memory is passed to processes of the agent's user only.
    ("POST", "/v1/stage", ADMIN),
    ("GET", "/v1/staged", ADMIN),
    ("DELETE", "/v1/staged", ADMIN),
    ("GET", "/v1/staged/{id}", ADMIN),
    ("GET", "/v1/peers", METRICS),
    // It shows the names that others read.
    ("GET", "/v1/ledger", ADMIN),
    ("GET", "/v1/chunks", ADMIN),
    ("GET", "/v1/names", READ),
    ("GET", "/v1/runs", READ),
    ("GET", "/v1/trees/{reference}", READ),
    ("GET", "/v1/calibration", METRICS),
    ("GET", "/v1/sites", METRICS),
    // They show the names and tenants of others.
    ("GET", "/v1/usage", ADMIN),
    ("GET", "/v1/audit", ADMIN),
    ("POST", "/v1/hints", READ),
    ("GET", "/v1/hints", PINS),
    // A token has its own names; these are of pods.
    ("POST", "/kube/filter", ADMIN),
    ("POST", "/kube/prioritize", ADMIN),
    ("POST", "/skypilot", ADMIN),
    ("POST", "/v1/hints/{id}/commit", WARM),
    ("GET", "/v1/hints/{id}", PINS),
    ("POST", "/v1/hints/{id}/outcome", PINS),
    ("GET", "/v1/files/{reference}/", READ),
    ("GET", "/v1/files/{reference}/{path}", READ),
    // They write objects to the repository.
    ("POST", "/v1/audit/heads", ADMIN),
    ("PUT", "/v1/audit/heads", ADMIN),
    ("GET", "/v1/tokens", ADMIN),
    ("POST", "/v1/tokens", ADMIN),
    ("DELETE", "/v1/tokens/{id}", ADMIN),
];

/// Right that a request needs of a token.
pub(super) fn need(method: &Method, path: &str) -> Need {
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    let found = NEEDS.iter().find(|(of, route, _)| *of == method && matches_route(path, route));
    found.map_or(ADMIN, |(_, _, need)| *need)
}

/// True if `path` matches `route`, in which a name in braces matches one segment, and `{path}` one or more.
pub(super) fn matches_route(path: &str, route: &str) -> bool {
    let (mut parts, mut names) = (path.split('/'), route.split('/'));
    loop {
        match (parts.next(), names.next()) {
            (None, None) => return true,
            (Some(part), Some("{path}")) => return !part.is_empty() || parts.next().is_some(),
            (Some(part), Some(name)) if part == name || name.starts_with('{') && !part.is_empty() => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_without_an_entry_is_for_admins_alone() {
        assert_eq!(need(&Method::GET, "/v1/names"), READ);
        assert_eq!(need(&Method::HEAD, "/v1/files/run@latest/a/b.bin"), READ);
        assert_eq!(need(&Method::GET, "/v1/files/a%2Fb/"), READ);
        assert_eq!(need(&Method::DELETE, "/v1/tasks/01A"), Need::Own);
        for (method, path) in [
            (Method::DELETE, "/v1/names"),
            (Method::GET, "/v1/none"),
            (Method::GET, "/v1/names/"),
            (Method::GET, "/v1/files/a"),
            (Method::GET, "/v1/files//b"),
            (Method::PUT, "/v1/files/a/b"),
            (Method::GET, "/v1/tasks/a/b"),
        ] {
            assert_eq!(need(&method, path), ADMIN, "{method} {path}");
        }
    }

    #[test]
    fn a_name_in_braces_is_one_part_and_a_path_is_several() {
        assert!(
            matches_route("/v1/tasks/a/events", "/v1/tasks/{id}/events")
                && !matches_route("/v1/tasks//events", "/v1/tasks/{id}/events")
        );
        assert!(
            matches_route("/v1/files/a/b/c", "/v1/files/{reference}/{path}")
                && matches_route("/v1/files/a/b/", "/v1/files/{reference}/{path}")
        );
        assert!(
            !matches_route("/v1/files/a/", "/v1/files/{reference}/{path}")
                && matches_route("/v1/files/a/", "/v1/files/{reference}/")
        );
    }
}
