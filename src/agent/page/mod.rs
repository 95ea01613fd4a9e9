//! The page: a dashboard of the agent and, by an advisor, of all sites, in a browser. It calls the API, with the rights of its token.
//!
//! ```text
//! GET /              index.html, which needs no token: it holds nothing of the agent
//! GET /page/NAME     what it loads; nothing comes from elsewhere
//! towline page       the same over the agent's socket (forward.rs)
//! ```
//!
//! The files are served as they are in `assets`: there is no build step. A browser may load and send nothing but what the
//! content security policy names (<https://www.w3.org/TR/CSP3/>), and no text of the API can become code: scripts are files of this
//! page alone, and nothing is parsed as HTML (<https://www.w3.org/TR/trusted-types/>).

mod forward;

use std::sync::LazyLock;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

pub use self::forward::PageServer;

/// Content security policy: a browser loads the files of the page, and calls the API that serves it, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Headers of each file. Browsers ask each time whether a file has changed, as a new version of the agent may serve others.
const HEADERS: [(HeaderName, &str); 7] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-cache"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// A file of the page.
#[derive(Debug)]
struct Asset {
    path: &'static str,
    kind: &'static str,
    body: &'static str,
}

macro_rules! assets {
    ($($path:literal $kind:ident $file:literal,)*) => {
        [$(Asset { path: $path, kind: $kind, body: include_str!(concat!("assets/", $file)) },)*]
    };
}

static ASSETS: [Asset; 19] = assets![
    "/" HTML "index.html",
    "/page/icon.svg" SVG "icon.svg",
    "/page/page.css" CSS "page.css",
    "/page/main.js" JS "main.js",
    "/page/api.js" JS "api.js",
    "/page/dom.js" JS "dom.js",
    "/page/format.js" JS "format.js",
    "/page/panel.js" JS "panel.js",
    "/page/rates.js" JS "rates.js",
    "/page/task.js" JS "task.js",
    "/page/virtual.js" JS "virtual.js",
    "/page/overview.js" JS "overview.js",
    "/page/sites.js" JS "sites.js",
    "/page/transfers.js" JS "transfers.js",
    "/page/cache.js" JS "cache.js",
    "/page/runs.js" JS "runs.js",
    "/page/hints.js" JS "hints.js",
    "/page/usage.js" JS "usage.js",
    "/page/audit.js" JS "audit.js",
];

/// Entity tags, in the order of [`ASSETS`].
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let tag = |asset: &Asset| format!("\"{}\"", &blake3::hash(asset.body.as_bytes()).to_hex()[..32]);
    ASSETS.iter().map(tag).collect()
});

/// True for the path of a file of the page: any process of this machine may read it.
pub(super) fn is_page(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

/// Routes of the files.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    ASSETS.iter().zip(&*TAGS).fold(Router::new(), |router, (asset, tag)| {
        router.route(asset.path, get(move |headers: HeaderMap| async move { serve(asset, tag, &headers) }))
    })
}

/// File at `path`, if it is one of the page.
fn file(path: &str, asked: &HeaderMap) -> Option<Response> {
    let (asset, tag) = ASSETS.iter().zip(&*TAGS).find(|(asset, _)| asset.path == path)?;
    Some(serve(asset, tag, asked))
}

fn serve(asset: &Asset, tag: &'static str, asked: &HeaderMap) -> Response {
    let is_known = asked.get(IF_NONE_MATCH).is_some_and(|known| known == tag);
    let mut response = if is_known { StatusCode::NOT_MODIFIED.into_response() } else { asset.body.into_response() };
    let headers = response.headers_mut();
    headers.extend(HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(asset.kind));
    headers.insert(ETAG, HeaderValue::from_static(tag));
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_file_that_a_file_names_is_served() {
        let served: BTreeSet<&str> = ASSETS.iter().map(|asset| asset.path).collect();
        for asset in &ASSETS {
            let named = asset.body.split('"').filter_map(|text| text.strip_prefix("./").or(text.strip_prefix("page/")));
            for name in named.filter(|name| name.contains('.')) {
                assert!(served.contains(format!("/page/{name}").as_str()), "{} names {name}", asset.path);
            }
        }
    }

    #[test]
    fn no_file_asks_for_anything_elsewhere_or_makes_code_of_texts() {
        for asset in &ASSETS {
            for bad in [
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "eval(",
                "Function(",
                "document.write",
                "import(",
                "style=",
            ] {
                assert!(!asset.body.contains(bad), "{}: {bad}", asset.path);
            }
            let urls = asset.body.replace("http://www.w3.org/2000/svg", "");
            assert!(!urls.contains("://"), "{}", asset.path);
        }
    }

    #[test]
    fn files_are_as_readable_as_the_others() {
        for asset in &ASSETS {
            let (mut lines, longest) = (asset.body.lines(), asset.body.lines().map(str::len).max());
            assert!(asset.body.is_ascii() && lines.clone().count() <= 600, "{}", asset.path);
            assert!(asset.kind == SVG || longest.is_some_and(|longest| longest <= 130), "{}: {longest:?}", asset.path);
            let first = lines.next().unwrap_or_default();
            assert!(asset.kind != JS || first.starts_with("// "), "{}: {first}", asset.path);
        }
    }

    #[test]
    fn a_browser_that_has_a_file_gets_no_body() {
        let mut asked = HeaderMap::new();
        assert_eq!(serve(&ASSETS[0], &TAGS[0], &asked).status(), StatusCode::OK);
        asked.insert(IF_NONE_MATCH, HeaderValue::from_static(&TAGS[0]));
        let response = serve(&ASSETS[0], &TAGS[0], &asked);
        assert_eq!(response.status(), StatusCode::NOT_MODIFIED);
        assert!(response.headers().contains_key(CONTENT_SECURITY_POLICY));
        asked.insert(IF_NONE_MATCH, HeaderValue::from_static(&TAGS[1]));
        assert_eq!(serve(&ASSETS[0], &TAGS[0], &asked).status(), StatusCode::OK);
    }
}
