//! Certificates for sidecars: who shows a token of a service account gets one with its SPIFFE id.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::Webhook;
use super::config::{IssuerConfig, SidecarIdentity};
use super::token_review::TokenReviewer;
use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::transfer::identity::Authority;
use crate::tree::FileStamp;

/// Days that a certificate is valid: a sidecar renews it long before, and one that was stolen is soon worth nothing.
const DAYS: u32 = 1;
/// Bytes of a request for a certificate, at most.
const REQUEST_LEN_MAX: usize = 16 << 10;
/// Certificate of the authority.
const AUTHORITY: &str = "ca.crt";
/// Log lines about requests that are refused.
static REFUSED: LogLimit = LogLimit::new();
/// Log lines about an authority that cannot be read.
static UNUSABLE: LogLimit = LogLimit::new();

/// Signs certificates of service accounts.
#[derive(Debug)]
pub(super) struct Issuer {
    folder: PathBuf,
    current: Mutex<(FileStamp, Arc<Authority>)>,
    reviewer: TokenReviewer,
    url: String,
}

/// Response with a certificate.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::agent) struct IssuedCertificate {
    /// The certificate, in PEM.
    pub(in crate::agent) certificate: String,
    /// Certificates of the trusted authorities, in PEM.
    pub(in crate::agent) authorities: String,
}

impl Issuer {
    /// Opens the authority. Blocking.
    ///
    /// # Errors
    /// Not found or damaged, for an authority that cannot be used, or if this is no pod of Kubernetes.
    pub(super) fn open(config: IssuerConfig) -> Result<Self> {
        let IssuerConfig { authority: folder, url, account } = config;
        let current = Mutex::new((FileStamp::at(&folder.join(AUTHORITY)), Arc::new(Authority::open(&folder)?)));
        Ok(Self { folder, current, reviewer: TokenReviewer::open(account)?, url })
    }

    /// Where sidecars fetch certificates, and what they trust.
    pub(super) fn sidecar_identity(&self) -> SidecarIdentity {
        SidecarIdentity { url: self.url.clone(), authorities: self.authority().trusted().to_owned() }
    }

    /// The authority in the current files; the previous one, while they cannot be used.
    fn authority(&self) -> Arc<Authority> {
        let stamp = FileStamp::at(&self.folder.join(AUTHORITY));
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != stamp {
            match Authority::open(&self.folder) {
                Ok(changed) => *current = (stamp, Arc::new(changed)),
                Err(error) => {
                    if let Some(kept_back) = UNUSABLE.may() {
                        tracing::warn!(
                            kept_back,
                            "cannot use the changed authority, the previous one signs: {error:?}"
                        );
                    }
                }
            }
        }
        Arc::clone(&current.1)
    }
}

/// Issues a certificate: the body is a certificate request in PEM, the token is in the header `Authorization`.
pub(super) async fn issue(
    State(webhook): State<Arc<Webhook>>,
    Extension(from): Extension<SocketAddr>,
    request: Request,
) -> Response {
    let token = bearer(request.headers());
    let body = match webhook.arriving.body(from, request, REQUEST_LEN_MAX).await {
        Ok(body) => body,
        Err(refused) => return refused,
    };
    let issued = match token {
        Ok(token) => webhook.issue(from.ip(), &token, &body).await,
        Err(error) => Err(error),
    };
    if let Some(counts) = webhook.agent.cluster.webhook.get() {
        let count = if issued.is_ok() { &counts.certificates_issued } else { &counts.certificates_refused };
        count.add_one();
    }
    match issued {
        Ok(issued) => Json(issued).into_response(),
        Err(error) => {
            if let Some(kept_back) = REFUSED.may() {
                tracing::warn!(kept_back, "issued no certificate: {error:?}");
            }
            let status = match error.kind() {
                ErrorKind::Usage => StatusCode::BAD_REQUEST,
                ErrorKind::Denied => StatusCode::FORBIDDEN,
                ErrorKind::NotFound => StatusCode::NOT_FOUND,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            };
            (status, error.to_string()).into_response()
        }
    }
}

impl Webhook {
    async fn issue(&self, from: IpAddr, token: &str, request: &[u8]) -> Result<IssuedCertificate> {
        let issuer = self.issuer.as_ref().ok_or_else(|| Error::not_found("this webhook issues no certificates"))?;
        let asked = std::str::from_utf8(request)
            .map_err(|source| Error::usage("certificate request is malformed").expected("PEM").source(source))?;
        let account = issuer.reviewer.account_of(from, token).await?;
        if !self.rights.know(&account) {
            return Err(Error::denied(format!(
                "no [[webhook.allow]] is about service account {}/{}",
                account.namespace, account.name
            )));
        }
        let identity = account.identity(&self.rights.trust_domain)?;
        let authority = issuer.authority();
        let certificate = authority.sign(asked, &identity, (DAYS, SystemClock.now()))?;
        tracing::info!(%identity, "issued a certificate");
        Ok(IssuedCertificate { certificate, authorities: authority.trusted().to_owned() })
    }
}

fn bearer(headers: &HeaderMap) -> Result<String> {
    let shown = headers.get(AUTHORIZATION).and_then(|shown| shown.to_str().ok()?.strip_prefix("Bearer "));
    shown
        .map(str::to_owned)
        .ok_or_else(|| Error::denied("request shows no token").expected("Authorization: Bearer TOKEN"))
}
