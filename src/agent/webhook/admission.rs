//! Reviews of the API server (<https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/>): a pod is
//! refused with a reason, or gets the sidecar.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Webhook;
use super::affinity::with_hint;
use super::annotations::{HintUse, PodAnnotations};
use super::config::ServiceAccount;
use super::inject::{add, inject};
use super::pod::Pod;
use crate::agent::api::hint_for_caller;
use crate::agent::kube::job_of_object;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::placement::HintRequest;
use crate::selector::{Choice, Selector};

/// Bytes of a review, at most: an API server takes requests of 3 MiB
/// (<https://github.com/kubernetes/apiserver/blob/kubernetes-1.35.0/pkg/server/config.go>, `MaxRequestBodyBytes`).
pub(super) const REVIEW_LEN_MAX: usize = 4 << 20;
/// Reviews that are read or answered at a time; others wait.
static REVIEWS: Semaphore = Semaphore::const_new(16);
/// Time that a review waits for others, and for its body. The chart lets the API server wait for 10 seconds.
const WAIT_MAX: Duration = Duration::from_secs(4);
/// Memory of a review, as a multiple of its length: the body, its parts, the pod.
const REVIEW_WEIGHT: u64 = 8;
/// Time that a preference waits for the chunks of inputs that are new to this agent. A requirement follows from the policy alone.
const HINT_WAIT: Duration = Duration::from_millis(100);
/// Characters of a refusal, at most.
const REFUSAL_LEN_MAX: usize = 1500;
/// Annotation of a pod that the kubelet runs from a file: nothing can change it.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// The parts of an `AdmissionReview` (`admission.k8s.io/v1`) that count.
#[derive(Debug, Deserialize)]
struct Review {
    request: ReviewRequest,
}

#[derive(Debug, Deserialize)]
struct ReviewRequest {
    uid: String,
    kind: Kind,
    #[serde(default)]
    namespace: String,
    operation: String,
    #[serde(default)]
    object: Value,
}

#[derive(Debug, Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}

/// Outcome for a pod that is admitted.
#[derive(Debug, Default)]
struct Admitted {
    /// Operations of a JSON patch.
    patch: Vec<Value>,
    /// Shown to whoever creates the pod.
    warnings: Vec<String>,
}

/// Answers a review. It changes nothing but the pod, so that dry runs need no care.
pub(super) async fn mutate(State(webhook): State<Arc<Webhook>>, request: Request) -> Response {
    let Ok(Ok(_permit)) = timeout(WAIT_MAX, REVIEWS.acquire()).await else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many reviews at once").into_response();
    };
    let body = match timeout(WAIT_MAX, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) => return rejection.into_response(),
        Err(_) => return StatusCode::REQUEST_TIMEOUT.into_response(),
    };
    let memory = webhook.agent.origin(None).and_then(|origin| origin.budget().keep(body.len() as u64 * REVIEW_WEIGHT));
    let _memory = match memory {
        Ok(memory) => memory,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    let review: Review = match serde_json::from_slice(&body) {
        Ok(review) => review,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("not an AdmissionReview: {error}")).into_response(),
    };
    let uid = review.request.uid.clone();
    let response = match webhook.admit(review.request).await {
        Ok(admitted) => allowed(&uid, &admitted),
        Err(error) => refused(&uid, &error),
    };
    Json(json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response }))
        .into_response()
}

fn allowed(uid: &str, admitted: &Admitted) -> Value {
    let mut response = json!({ "uid": uid, "allowed": true });
    if !admitted.warnings.is_empty() {
        response["warnings"] = json!(admitted.warnings);
    }
    if !admitted.patch.is_empty() {
        response["patchType"] = "JSONPatch".into();
        response["patch"] = BASE64_STANDARD.encode(json!(admitted.patch).to_string()).into();
    }
    response
}

fn refused(uid: &str, error: &Error) -> Value {
    let help = error.help_text().map(|help| format!(" ({help})")).unwrap_or_default();
    let message: String = format!("towline: {error}{help}").chars().take(REFUSAL_LEN_MAX).collect();
    let code = match error.kind() {
        ErrorKind::Usage => 422,
        ErrorKind::Denied | ErrorKind::NotFound => 403,
        // Whoever creates the pod tries again.
        _ => 503,
    };
    json!({ "uid": uid, "allowed": false, "status": { "code": code, "message": message } })
}

impl Webhook {
    /// The patch of a pod that is created; an empty one for anything else, and for a pod that asks for nothing.
    ///
    /// # Errors
    /// Usage, for a pod that cannot be what it asks for; denied, for a name that its service account may not use, also if there is none.
    async fn admit(&self, request: ReviewRequest) -> Result<Admitted> {
        let created = request.operation == "CREATE" && request.kind.group.is_empty() && request.kind.kind == "Pod";
        if !created {
            return Ok(Admitted::default());
        }
        let pod = Pod::of(&request.object)?;
        let mirror = pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(MIRROR));
        let wanted = pod.annotations()?;
        if mirror || pod.has_sidecar() || !(wanted.need_sidecar() || wanted.hint.is_some()) {
            return Ok(Admitted::default());
        }
        let account = ServiceAccount { namespace: request.namespace, name: pod.account().to_owned() };
        let mut admitted = Admitted::default();
        let names = self.names(&account, &wanted, &mut admitted.warnings).await?;
        if let Some(hint_use) = wanted.hint.filter(|_| !names.is_empty()) {
            let inputs: Vec<String> = names.iter().map(ToString::to_string).collect();
            let (workload, objective) = job_of_object(&request.object)?;
            let about = HintRequest { workload, objective, ..HintRequest::about(&inputs) };
            self.place(&pod, (&account, hint_use), &about, &mut admitted).await?;
        }
        if wanted.need_sidecar() {
            admitted.patch.extend(inject(&pod, &wanted, &self.config.sidecar)?);
        }
        Ok(admitted)
    }

    /// The names that the pod reads, each resolved. A run without a step that the account may read is a warning: a training begins so.
    ///
    /// # Errors
    /// Denied, for a name that the account may not use: the same one, whether there is such a name or not.
    async fn names(
        &self,
        account: &ServiceAccount,
        wanted: &PodAnnotations,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<Name>> {
        let who = format!("service account {}/{}", account.namespace, account.name);
        let identity = account.identity(&self.config.trust_domain)?;
        let mut names = Vec::new();
        for (folder, run) in &wanted.watch {
            let step: Name = format!("{run}/step-0").parse()?;
            if !self.config.allows(account, &step) {
                return Err(Error::denied(format!("{who} may not save checkpoints of {folder}"))
                    .at(run)
                    .help("[[webhook.allow]] of the webhook says which names it may use"));
            }
            let latest = Selector::Step { run: run.clone(), choice: Choice::Latest };
            match self.resolve(account, &identity, &latest).await {
                Ok(name) => names.push(name),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    warnings.push(format!("towline: {run} has no step that {who} may read: {folder} begins empty"));
                }
                Err(error) => return Err(error),
            }
        }
        for selector in wanted.inputs() {
            match (self.resolve(account, &identity, selector).await, selector) {
                (Ok(name), _) => names.push(name),
                (Err(error), Selector::Step { run, .. }) if error.kind() == ErrorKind::NotFound => {
                    warnings
                        .push(format!("towline: {run} has no such step that {who} may read: {selector} is left out"));
                }
                (Err(error), _) if error.kind() == ErrorKind::NotFound => {
                    return Err(Error::denied(format!("there is no such name that {who} may read"))
                        .at(selector)
                        .help("it is absent, or [[webhook.allow]] or the policy do not permit it"));
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(names)
    }

    async fn resolve(&self, account: &ServiceAccount, identity: &Identity, selector: &Selector) -> Result<Name> {
        let allowed = |_: Option<&Identity>, name: &Name| self.config.allows(account, name);
        let (exchange, repository) = (self.agent.exchange()?, self.agent.origin(None)?);
        exchange.resolve_allowed(identity, repository, selector, allowed).await
    }

    /// Adds the affinity that the hint about a job gives.
    ///
    /// # Errors
    /// Usage, if a requirement cannot be answered; denied, if the data may go nowhere.
    async fn place(
        &self,
        pod: &Pod,
        (account, hint_use): (&ServiceAccount, HintUse),
        about: &HintRequest,
        admitted: &mut Admitted,
    ) -> Result<()> {
        let wait = if hint_use == HintUse::Required { Duration::ZERO } else { HINT_WAIT };
        let may = |name: &Name| self.config.allows(account, name);
        match hint_for_caller(&self.agent, about, may, wait).await {
            Ok(hint) => {
                admitted.patch.push(add("/spec/affinity", &with_hint(pod.spec.affinity.as_ref(), hint_use, &hint)?));
                Ok(())
            }
            Err(error) if hint_use == HintUse::Preferred => {
                admitted.warnings.push(format!("towline: no hint, so no preference: {error}"));
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Error::usage(format!("cannot require a hint: {error}")).at("towline.dev/hint"))
            }
            Err(error) => Err(error),
        }
    }
}
