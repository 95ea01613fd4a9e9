//! Reviews of the API server (<https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/>): a pod is
//! refused with a reason, or gets the sidecar.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::Webhook;
use super::affinity::OwnAffinity;
use super::certificates::Issuer;
use super::config::SidecarTemplate;
use super::inject::{add, annotate, inject};
use super::pod::{Pod, PodHead};
use crate::agent::advisor::HintCaller;
use crate::agent::api::hint_for_caller;
use crate::agent::counts::ReviewOutcome;
use crate::agent::kube::job_of_text;
use crate::agent::pods::{HintUse, PLACED, PodAnnotations, ResolvedNames, ServiceAccount};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::placement::{Hint, HintRequest, Objective, Workload};
use crate::work::blocking;

/// Bytes of a review, at most: an API server takes requests of 3 MiB
/// (<https://github.com/kubernetes/apiserver/blob/kubernetes-1.35.0/pkg/server/config.go>, `MaxRequestBodyBytes`).
pub(super) const REVIEW_LEN_MAX: usize = 4 << 20;
/// Time of a review; the chart lets the API server wait for 10 seconds.
const REVIEW_MAX: Duration = Duration::from_secs(8);
/// Bytes of the id of a review, at most; an API server sends a UUID.
const UID_LEN_MAX: usize = 256;
/// Memory of a review, as a multiple of its length: the body, and what is kept of its pod.
const REVIEW_WEIGHT: u64 = 8;
/// Time that a preference waits for the chunks of inputs that are new to this agent. A requirement follows from the policy alone.
const HINT_WAIT: Duration = Duration::from_millis(100);
/// Characters of a refusal, at most.
const REFUSAL_LEN_MAX: usize = 1500;

/// The parts of an `AdmissionReview` (`admission.k8s.io/v1`) that count.
#[derive(Debug, Deserialize)]
struct Review<'a> {
    #[serde(borrow)]
    request: ReviewRequest<'a>,
}

#[derive(Debug, Deserialize)]
struct ReviewRequest<'a> {
    uid: String,
    kind: Kind,
    #[serde(default)]
    namespace: String,
    operation: String,
    /// JSON of the object, not parsed yet: senders need no credential.
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}

/// A review that was read.
#[derive(Debug)]
struct Reviewed {
    uid: String,
    asked: Result<Option<Asked>>,
}

/// A pod that is created, and asks for something.
#[derive(Debug)]
struct Asked {
    pod: Pod,
    account: ServiceAccount,
    wanted: PodAnnotations,
    /// True if it gets the sidecar.
    injects: bool,
    gates: bool,
    hint: Option<AskedHint>,
}

#[derive(Debug)]
struct AskedHint {
    hint_use: HintUse,
    workload: Workload,
    objective: Objective,
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
pub(super) async fn mutate(
    State(webhook): State<Arc<Webhook>>,
    Extension(from): Extension<SocketAddr>,
    request: Request,
) -> Response {
    let body = match webhook.arriving.body(from, request, REVIEW_LEN_MAX).await {
        Ok(body) => body,
        Err(refused) => return refused,
    };
    let memory = webhook.agent.origin(None).and_then(|origin| origin.budget().keep(body.len() as u64 * REVIEW_WEIGHT));
    let memory = match memory {
        Ok(memory) => Arc::new(memory),
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    let held = Arc::clone(&memory);
    let read = blocking(move || {
        let read = Reviewed::read(&body);
        // The memory counts until then, also if the client is gone.
        drop((body, held));
        read
    });
    let Reviewed { uid, asked } = match read.await {
        Ok(reviewed) => reviewed,
        Err(error) => {
            let text: String = error.to_string().chars().take(REFUSAL_LEN_MAX).collect();
            let is_request = error.kind() == ErrorKind::Usage;
            let status = if is_request { StatusCode::BAD_REQUEST } else { StatusCode::SERVICE_UNAVAILABLE };
            return (status, text).into_response();
        }
    };
    let late = || Error::unreachable("review took too long").help("try again");
    let admitted = timeout(REVIEW_MAX, webhook.admit(asked)).await.unwrap_or_else(|_| Err(late()));
    if let Some(counts) = webhook.agent.cluster.webhook.get() {
        counts.reviewed(outcome(&admitted));
    }
    let response = match admitted {
        Ok(admitted) => allowed(&uid, &admitted),
        Err(error) => refused(&uid, &error),
    };
    Json(json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response }))
        .into_response()
}

fn outcome(admitted: &Result<Admitted>) -> ReviewOutcome {
    match admitted {
        Ok(admitted) if admitted.patch.is_empty() => ReviewOutcome::Unchanged,
        Ok(_) => ReviewOutcome::Patched,
        Err(error) if status(error) == 503 => ReviewOutcome::Failed,
        Err(_) => ReviewOutcome::Refused,
    }
}

/// Status of a refusal.
fn status(error: &Error) -> u16 {
    match error.kind() {
        ErrorKind::Usage => 422,
        ErrorKind::Denied | ErrorKind::NotFound => 403,
        // The creator of the pod, such as the controller of jobs, tries again.
        _ => 503,
    }
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
    json!({ "uid": uid, "allowed": false, "status": { "code": status(error), "message": message } })
}

impl Reviewed {
    /// Reads a review.
    ///
    /// # Errors
    /// Usage, if it is none. A pod that cannot be read is no error: it is refused.
    fn read(body: &[u8]) -> Result<Self> {
        let malformed = |source| Error::usage(format!("not an AdmissionReview: {source}"));
        let Review { request } = serde_json::from_slice(body).map_err(malformed)?;
        if request.uid.len() > UID_LEN_MAX {
            return Err(Error::usage("not an AdmissionReview")
                .at("uid")
                .expected(format!("at most {UID_LEN_MAX} bytes"))
                .got(request.uid.len()));
        }
        let created = request.operation == "CREATE" && request.kind.group.is_empty() && request.kind.kind == "Pod";
        let object = request.object.map_or("null", RawValue::get);
        let asked = if created { Asked::of(object, request.namespace) } else { Ok(None) };
        Ok(Self { uid: request.uid, asked })
    }
}

impl Asked {
    /// Reads a pod in JSON; none, for a pod that asks for nothing, or has it already.
    ///
    /// # Errors
    /// Usage, for a pod that cannot be what it asks for.
    fn of(object: &str, namespace: String) -> Result<Option<Self>> {
        let head = PodHead::of(object)?;
        let wanted = head.annotations()?;
        if head.is_mirror() || !(wanted.need_sidecar() || wanted.hint.is_some() || wanted.gated) {
            return Ok(None);
        }
        let pod = Pod::of(object)?;
        let account = ServiceAccount { namespace, name: pod.account().to_owned() };
        let injects = wanted.need_sidecar() && !pod.has_sidecar()?;
        let gates = wanted.gated && !pod.is_gated();
        let hint = match wanted.hint.filter(|_| !pod.is_placed()) {
            None => None,
            Some(hint_use) => {
                let (workload, objective) = job_of_text(object)?;
                Some(AskedHint { hint_use, workload, objective })
            }
        };
        let asks = injects || gates || hint.is_some();
        Ok(asks.then_some(Self { pod, account, wanted, injects, gates, hint }))
    }
}

impl Webhook {
    /// The patch of a pod that is created; an empty one for anything else, and for a pod that asks for nothing.
    ///
    /// # Errors
    /// Usage, for a pod that cannot be what it asks for; denied, for a name that its service account may not use, also if there is none.
    async fn admit(&self, asked: Result<Option<Asked>>) -> Result<Admitted> {
        let mut admitted = Admitted::default();
        let Some(Asked { pod, account, wanted, injects, gates, hint: asked }) = asked? else { return Ok(admitted) };
        let resolved = self.rights.resolve(&self.agent, &account, &wanted.names()).await?;
        let ResolvedNames { names, warnings, .. } = resolved;
        admitted.warnings.extend(warnings.iter().map(|warning| format!("towline: {warning}")));
        let mut hint = None;
        if let Some(AskedHint { hint_use, workload, objective }) = asked {
            let inputs: Vec<String> = names.iter().map(ToString::to_string).collect();
            let about = HintRequest { workload, objective, ..HintRequest::about(&inputs) };
            hint = self.place(&pod, (&account, hint_use), &about, &mut admitted).await?;
        }
        if injects {
            let sidecar = SidecarTemplate {
                identity: self.issuer.as_ref().map(Issuer::sidecar_identity),
                ..self.config.sidecar.clone()
            };
            admitted.patch.extend(inject(&pod, &wanted, &sidecar)?);
        }
        if gates {
            let gate = self.gate((&pod, &account), (&wanted, &names), hint.as_ref());
            admitted.patch.extend(gate.await?);
        }
        Ok(admitted)
    }

    /// Adds the affinity that the hint about a job gives; returns the hint, if there is one.
    ///
    /// # Errors
    /// Usage, if a requirement cannot be answered; denied, if the data may go nowhere.
    async fn place(
        &self,
        pod: &Pod,
        (account, hint_use): (&ServiceAccount, HintUse),
        about: &HintRequest,
        admitted: &mut Admitted,
    ) -> Result<Option<Hint>> {
        if about.inputs.is_empty() {
            let nothing = "there is nothing to place this pod by: none of its names is there yet";
            if hint_use == HintUse::Required {
                return Err(Error::usage(nothing).at("towline.dev/hint").help("use `preferred`, or name an input"));
            }
            admitted.warnings.push(format!("towline: {nothing}"));
            return Ok(None);
        }
        let wait = if hint_use == HintUse::Required { Duration::ZERO } else { HINT_WAIT };
        let may = |name: &Name| self.rights.allow(account, name);
        match hint_for_caller(&self.agent, HintCaller::namespace(&account.namespace), about, may, wait).await {
            Ok(hint) => {
                let own = OwnAffinity::of(pod.spec.affinity.as_deref())?;
                let _memory = self.agent.origin(None)?.budget().keep(own.memory())?;
                admitted.patch.push(annotate(PLACED, "by-hint"));
                admitted.patch.push(add("/spec/affinity", &own.with_hint(hint_use, &hint)?));
                Ok(Some(hint))
            }
            Err(error) if hint_use == HintUse::Preferred => {
                admitted.warnings.push(format!("towline: no hint, so no preference: {error}"));
                Ok(None)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Error::usage(format!("cannot require a hint: {error}")).at("towline.dev/hint"))
            }
            Err(error) => Err(error),
        }
    }
}
