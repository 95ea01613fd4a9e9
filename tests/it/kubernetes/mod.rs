//! Strict stand-in for the API server of a cluster with pods and Kueue: TLS, tokens, rights, schemas, versions, pages, watches, server-side apply.
//! Nothing that it does not know is answered otherwise than with an error.

mod apply;
mod schema;
mod store;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use futures::stream::unfold;
use http_body_util::BodyExt as _;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use self::store::{Key, Refused, Store};

/// Token of the controller's service account.
const TOKEN: &str = "token-of-towline";
/// Manager by which Kueue applies.
const KUEUE: &str = "kueue-admission";
/// Paths of the namespace that the controller may have leases in.
pub(crate) const NAMESPACE: &str = "towline";

/// Faults that a test sets.
#[derive(Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "faults are independent of each other")]
pub(crate) struct Faults {
    /// It answers nothing but that it is overloaded.
    pub(crate) unavailable: bool,
    /// Changes of pods are refused, as by a policy of the cluster.
    pub(crate) refuses_pods: bool,
    /// Writes of events are not answered.
    pub(crate) no_events: bool,
    /// Answers take that long.
    pub(crate) delay: Duration,
    /// Writes that conflict from now on.
    pub(crate) conflicts: u32,
    /// Watches of changes that are forgotten are refused, instead of ended by an event.
    pub(crate) gone_by_status: bool,
}

/// A server that runs until dropped.
pub(crate) struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    _runtime: Runtime,
}

struct Shared {
    /// Rules of roles.
    rules: Value,
    store: Mutex<Store>,
    faults: Mutex<Faults>,
    /// Requests that were refused for lack of rights, or that no server would understand.
    wrong: Mutex<Vec<String>>,
    /// Number of requests by verb and resource.
    counted: Mutex<BTreeMap<String, u64>>,
    /// Changed with each version, and when watches must end.
    version: watch::Sender<(u64, u64)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ApiServer {
    /// Starts one with the certificate in `folder`, which is for `localhost`. The controller may do what `rules` say, as JSON.
    pub(crate) fn start(folder: &Path, rules: &'static str) -> Self {
        let certificates = CertificateDer::pem_file_iter(folder.join("tls.crt")).unwrap();
        let certificates = certificates.map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(folder.join("tls.key")).unwrap();
        let tls = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates, key)
            .unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shared = Arc::new(Shared {
            rules: serde_json::from_str(rules).unwrap(),
            store: Mutex::default(),
            faults: Mutex::default(),
            wrong: Mutex::default(),
            counted: Mutex::default(),
            version: watch::Sender::new((0, 0)),
        });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(serve(Arc::clone(&shared), listener, TlsAcceptor::from(Arc::new(tls))));
        Self { shared, address, _runtime: runtime }
    }

    /// Writes a kubeconfig for it.
    pub(crate) fn write_kubeconfig(&self, path: &Path, authority: &Path, token: Option<&str>) {
        let server = format!("https://localhost:{}", self.address.port());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": server, "certificate-authority": authority } }],
            "users": [{ "name": "u", "user": { "token": token.unwrap_or(TOKEN) } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u", "namespace": NAMESPACE } }],
        });
        std::fs::write(path, config.to_string()).unwrap();
    }

    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut lock(&self.shared.faults));
    }

    /// Ends all watches; the changes up to now are forgotten, if `forget`.
    pub(crate) fn cut_watches(&self, forget: bool) {
        if forget {
            let mut store = lock(&self.shared.store);
            (store.compacted, store.changes) = (store.version, Vec::new());
        }
        self.shared.version.send_modify(|(_, cut)| *cut += 1);
    }

    pub(crate) fn create(&self, plural: &str, object: Value) -> Value {
        let key = key_of(plural, &object);
        self.write(|store| store.create(&key, object))
    }

    pub(crate) fn replace(&self, plural: &str, object: Value) -> Value {
        let key = key_of(plural, &object);
        self.write(|store| store.replace(&key, object))
    }

    pub(crate) fn delete(&self, plural: &str, namespace: &str, name: &str) {
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        lock(&self.shared.store).delete(&key);
        self.shared.tell();
    }

    /// Applies a status as Kueue does.
    pub(crate) fn apply(&self, plural: &str, namespace: &str, name: &str, status: &Value) -> Value {
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.write(|store| store.apply(&key, &json!({ "metadata": {}, "status": status }), (KUEUE, true)))
    }

    /// Merges a status as Kueue does with `WorkloadRequestUseMergePatch`.
    pub(crate) fn merge(&self, plural: &str, namespace: &str, name: &str, status: &Value) -> Value {
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.write(|store| store.merge(&key, &json!({ "metadata": {}, "status": status }), "kueue"))
    }

    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Value {
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        lock(&self.shared.store).objects.get(&key).cloned().unwrap_or(Value::Null)
    }

    /// All objects of a kind.
    pub(crate) fn all(&self, plural: &str) -> Vec<Value> {
        let store = lock(&self.shared.store);
        store.objects.iter().filter(|(key, _)| key.0 == plural).map(|(_, object)| object.clone()).collect()
    }

    /// Requests that were not understood, or not permitted.
    pub(crate) fn wrong(&self) -> Vec<String> {
        lock(&self.shared.wrong).clone()
    }

    /// Requests so far, such as `patch workloads/status`.
    pub(crate) fn counted(&self, request: &str) -> u64 {
        lock(&self.shared.counted).get(request).copied().unwrap_or(0)
    }

    fn write(&self, write: impl FnOnce(&mut Store) -> Result<Value, Refused>) -> Value {
        let written = write(&mut lock(&self.shared.store)).unwrap();
        self.shared.tell();
        written
    }
}

impl Shared {
    fn tell(&self) {
        let version = lock(&self.store).version;
        self.version.send_modify(|(known, _)| *known = version);
    }
}

fn key_of(plural: &str, object: &Value) -> Key {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (plural.to_owned(), text("namespace"), text("name"))
}

async fn serve(shared: Arc<Shared>, listener: TcpListener, tls: TlsAcceptor) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (shared, tls) = (Arc::clone(&shared), tls.clone());
        tokio::spawn(async move {
            let Ok(stream) = tls.accept(stream).await else { return };
            let service = service_fn(|request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(answer(shared, request).await) }
            });
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Parts of a request.
struct Asked {
    method: Method,
    group: String,
    key: Key,
    subresource: String,
    query: BTreeMap<String, String>,
    content: String,
}

impl Asked {
    /// Verb, as rights name it (<https://kubernetes.io/docs/reference/access-authn-authz/authorization/#determine-the-request-verb>).
    fn verb(&self) -> &'static str {
        match (&self.method, self.key.2.is_empty()) {
            (&Method::GET, true) if self.query.get("watch").is_some_and(|watch| watch == "true") => "watch",
            (&Method::GET, true) => "list",
            (&Method::GET, false) => "get",
            (&Method::POST, _) => "create",
            (&Method::PUT, _) => "update",
            (&Method::PATCH, _) => "patch",
            _ => "other",
        }
    }

    fn resource(&self) -> String {
        if self.subresource.is_empty() { self.key.0.clone() } else { format!("{}/{}", self.key.0, self.subresource) }
    }

    /// True if the rules that the chart gives the controller permit it.
    fn is_permitted(&self, rules: &Value) -> bool {
        let has = |rule: &Value, list: &str, wanted: &str| rule[list].as_array().unwrap().contains(&wanted.into());
        let elsewhere = self.group == "coordination.k8s.io" && self.key.1 != NAMESPACE;
        !elsewhere
            && rules.as_array().unwrap().iter().any(|rule| {
                has(rule, "apiGroups", &self.group)
                    && has(rule, "resources", &self.resource())
                    && has(rule, "verbs", self.verb())
                    && (rule["resourceNames"].is_null() || has(rule, "resourceNames", &self.key.2))
            })
    }
}

fn parse(request: &Request<hyper::body::Incoming>) -> Option<Asked> {
    let steps: Vec<&str> = request.uri().path().split('/').skip(1).collect();
    let (group, version, rest) = match steps.as_slice() {
        ["api", version, rest @ ..] => (&"", version, rest),
        ["apis", group, version, rest @ ..] => (group, version, rest),
        _ => return None,
    };
    let known = [("", "v1"), ("kueue.x-k8s.io", "v1beta2"), ("coordination.k8s.io", "v1"), ("events.k8s.io", "v1")];
    if !known.contains(&(*group, *version)) {
        return None;
    }
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] => (*namespace, rest),
        rest => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return None,
    };
    let query = request.uri().query().unwrap_or_default();
    let header = |name: &str| request.headers().get(name).and_then(|text| text.to_str().ok()).unwrap_or_default();
    Some(Asked {
        method: request.method().clone(),
        group: (*group).to_owned(),
        key: (plural.to_owned(), namespace.to_owned(), name.to_owned()),
        subresource: subresource.to_owned(),
        query: url::form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        content: header("content-type").to_owned(),
    })
}

async fn answer(shared: Arc<Shared>, request: Request<hyper::body::Incoming>) -> Response<Body> {
    let faults = lock(&shared.faults).clone();
    tokio::time::sleep(faults.delay).await;
    if faults.no_events && request.uri().path().contains("/events") {
        std::future::pending::<()>().await;
    }
    let what = format!("{} {}", request.method(), request.uri());
    let note = |text: &str| lock(&shared.wrong).push(format!("{what}: {text}"));
    let token = request.headers().get("authorization").and_then(|text| text.to_str().ok());
    if token != Some(&format!("Bearer {TOKEN}")) {
        return refusal(&Refused(401, "Unauthorized", "Unauthorized".to_owned()));
    }
    let Some(asked) = parse(&request) else {
        note("no such path");
        return refusal(&Refused(404, "NotFound", "the server could not find the requested resource".to_owned()));
    };
    *lock(&shared.counted).entry(format!("{} {}", asked.verb(), asked.resource())).or_default() += 1;
    if faults.unavailable {
        return refusal(&Refused(503, "ServiceUnavailable", "the server is overloaded".to_owned()));
    }
    if !asked.is_permitted(&shared.rules) {
        note("forbidden");
        let text = format!("cannot {} resource {:?}", asked.verb(), asked.resource());
        return refusal(&Refused(403, "Forbidden", text));
    }
    let body = request.into_body().collect().await.unwrap().to_bytes();
    if asked.verb() == "watch" {
        return watched(shared, &asked);
    }
    if asked.verb() == "list" {
        return listed(&shared, &asked);
    }
    let body: Value = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    match written(&shared, &asked, body) {
        Ok(object) => {
            shared.tell();
            respond(if asked.method == Method::POST { 201 } else { 200 }, object.to_string().into())
        }
        Err(refused) => {
            // Conflicts are a part of life; what is malformed is not.
            if matches!(refused.0, 400 | 415 | 422) {
                note(&refused.2);
            }
            refusal(&refused)
        }
    }
}

fn written(shared: &Shared, asked: &Asked, mut body: Value) -> Result<Value, Refused> {
    let mut store = lock(&shared.store);
    if asked.method != Method::GET {
        let mut faults = lock(&shared.faults);
        if faults.conflicts > 0 && ["kueue.x-k8s.io", ""].contains(&asked.group.as_str()) {
            faults.conflicts -= 1;
            return Err(Refused(409, "Conflict", "the object has been modified".to_owned()));
        }
    }
    match (&asked.method, asked.subresource.as_str()) {
        (&Method::GET, "") => store.get(&asked.key).cloned(),
        (&Method::POST, "") => {
            let (plural, namespace, _) = &asked.key;
            let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            body["metadata"]["namespace"] = namespace.as_str().into();
            store.create(&(plural.clone(), namespace.clone(), name), body)
        }
        (&Method::PUT, "") => store.replace(&asked.key, body),
        (&Method::PATCH, "") if asked.key.0 == "pods" && lock(&shared.faults).refuses_pods => {
            Err(Refused(403, "Forbidden", "denied by policy keep-gates".to_owned()))
        }
        (&Method::PATCH, "") if asked.key.0 == "pods" && asked.content == "application/strategic-merge-patch+json" => {
            store.patch_pod(&asked.key, &body)
        }
        (&Method::PATCH, "") if asked.key.0 == "events" => store.get(&asked.key).cloned(),
        (&Method::PATCH, "status") => {
            let parameter = |name: &str| asked.query.get(name).map(String::as_str);
            let manager = parameter("fieldManager");
            let manager = manager.ok_or_else(|| Refused(422, "Invalid", "fieldManager is required".to_owned()))?;
            let named = (body["metadata"]["name"].as_str(), body["metadata"]["namespace"].as_str().unwrap_or_default());
            if named != (Some(&asked.key.2), &asked.key.1) {
                return Err(Refused(400, "BadRequest", format!("the name of the object is {named:?}")));
            }
            match asked.content.as_str() {
                "application/apply-patch+yaml" => {
                    store.apply(&asked.key, &body, (manager, parameter("force") == Some("true")))
                }
                "application/merge-patch+json" => store.merge(&asked.key, &body, manager),
                other => Err(Refused(415, "UnsupportedMediaType", other.to_owned())),
            }
        }
        _ => Err(Refused(405, "MethodNotAllowed", "not allowed".to_owned())),
    }
}

/// A page of the objects of a kind.
fn listed(shared: &Shared, asked: &Asked) -> Response<Body> {
    let store = lock(&shared.store);
    let after = asked.query.get("continue").map_or(0, |token| token.parse().unwrap());
    let limit = asked.query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let selector = asked.query.get("fieldSelector").map(String::as_str);
    let wanted = |(key, one): &(&Key, &Value)| key.0 == asked.key.0 && is_selected(one, selector);
    let all: Vec<&Value> = store.objects.iter().filter(wanted).map(|(_, one)| one).collect();
    let items: Vec<&Value> = all.iter().skip(after).take(limit).copied().collect();
    let mut metadata = json!({ "resourceVersion": store.version.to_string() });
    if after + items.len() < all.len() {
        metadata["continue"] = (after + items.len()).to_string().into();
    }
    let version = if asked.group.is_empty() { "v1" } else { "kueue.x-k8s.io/v1beta2" };
    let list = json!({ "apiVersion": version, "kind": "List", "metadata": metadata, "items": items });
    respond(200, list.to_string().into())
}

/// Changes of the objects of a kind, until watches are cut.
fn watched(shared: Arc<Shared>, asked: &Asked) -> Response<Body> {
    let from: u64 = asked.query.get("resourceVersion").map_or(0, |version| version.parse().unwrap());
    if from < lock(&shared.store).compacted {
        let gone = Refused(410, "Expired", "too old resource version".to_owned());
        if lock(&shared.faults).gone_by_status {
            return refusal(&gone);
        }
        // As real servers do.
        return respond(200, format!("{}\n", json!({ "type": "ERROR", "object": status_of(&gone) })).into());
    }
    let (plural, versions) = (asked.key.0.clone(), shared.version.subscribe());
    let selector = asked.query.get("fieldSelector").cloned();
    let cut = versions.borrow().1;
    let lines = unfold((shared, versions, from), move |(shared, mut versions, seen)| {
        let (plural, selector) = (plural.clone(), selector.clone());
        async move {
            loop {
                let changed = versions.borrow_and_update().1;
                if changed != cut {
                    return None;
                }
                let (lines, version) = {
                    let store = lock(&shared.store);
                    let first = store.changes.partition_point(|change| change.version <= seen);
                    let new = store.changes[first..].iter().filter(|change| change.plural == plural);
                    let line = |change: &store::Change| {
                        let kind = change.kind_for(selector.as_deref())?;
                        Some(format!("{}\n", json!({ "type": kind, "object": change.object })))
                    };
                    (new.filter_map(line).collect::<String>(), store.version)
                };
                if !lines.is_empty() {
                    return Some((Ok::<_, Infallible>(lines), (shared, versions, version)));
                }
                versions.changed().await.ok()?;
            }
        }
    });
    respond(200, Body::from_stream(lines))
}

/// True for an object with the fields of a selector `PATH=VALUE,...`, and for all without one; a field that is absent is empty.
fn is_selected(object: &Value, selector: Option<&str>) -> bool {
    let Some(selector) = selector else { return true };
    selector.split(',').all(|one| {
        let (path, value) = one.split_once('=').unwrap();
        let known = ["spec.nodeName", "status.phase"].contains(&path);
        let field = path.split('.').fold(object, |object, step| &object[step]);
        known && field.as_str().unwrap_or_default() == value
    })
}

fn status_of(Refused(code, reason, message): &Refused) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

fn refusal(refused: &Refused) -> Response<Body> {
    respond(refused.0, status_of(refused).to_string().into())
}

fn respond(code: u16, body: Body) -> Response<Body> {
    let answer = Response::builder().status(StatusCode::from_u16(code).unwrap());
    answer.header("content-type", "application/json").body(body).unwrap()
}
