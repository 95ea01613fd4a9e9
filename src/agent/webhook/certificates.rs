//! Certificates for sidecars: who shows a token of a service account gets one with its SPIFFE id.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Webhook;
use super::config::{IssuerConfig, SidecarIdentity};
use super::token_review::TokenReviewer;
use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::transfer::identity::Authority;

/// Days that a certificate is valid: a sidecar renews it long before, and one that was stolen is soon worth nothing.
const DAYS: u32 = 1;
/// Bytes of a request for a certificate, at most.
const REQUEST_LEN_MAX: usize = 16 << 10;
/// Requests that are answered at a time; others are refused, and tried again by their sidecars.
static REQUESTS: Semaphore = Semaphore::const_new(16);
/// Time that a request has to arrive.
const BODY_WITHIN: Duration = Duration::from_secs(2);
/// Log lines about requests that are refused.
static REFUSED: LogLimit = LogLimit::new();

/// Signs certificates of service accounts.
#[derive(Debug)]
pub(super) struct Issuer {
    authority: Authority,
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
        let IssuerConfig { authority, url, account } = config;
        Ok(Self { authority: Authority::open(&authority)?, reviewer: TokenReviewer::open(account)?, url })
    }

    pub(super) fn sidecar_identity(&self) -> SidecarIdentity {
        SidecarIdentity { url: self.url.clone(), authorities: self.authority.trusted().to_owned() }
    }
}

/// Issues a certificate: the body is a certificate request in PEM, the token is in the header `Authorization`.
pub(super) async fn issue(State(webhook): State<Arc<Webhook>>, request: Request) -> Response {
    match webhook.issue(request).await {
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
    async fn issue(&self, request: Request) -> Result<IssuedCertificate> {
        let issuer = self.issuer.as_ref().ok_or_else(|| Error::not_found("this webhook issues no certificates"))?;
        let _permit =
            REQUESTS.try_acquire().map_err(|_| Error::exhausted("too many requests for certificates at once"))?;
        let token = bearer(request.headers())?.to_owned();
        let body = timeout(BODY_WITHIN, Bytes::from_request(request, &())).await;
        let body = body.map_err(|_| Error::unreachable("request did not arrive in time"))?;
        let body = body.map_err(|source| Error::usage("request cannot be read").source(source.body_text()))?;
        let asked = std::str::from_utf8(&body).ok().filter(|_| body.len() <= REQUEST_LEN_MAX);
        let asked = asked.ok_or_else(|| Error::usage("certificate request is malformed").expected("PEM"))?;
        let account = issuer.reviewer.account_of(&token).await?;
        if !self.config.knows(&account) {
            return Err(Error::denied(format!(
                "no [[webhook.allow]] is about service account {}/{}",
                account.namespace, account.name
            )));
        }
        let identity = account.identity(&self.config.trust_domain)?;
        let certificate = issuer.authority.sign(asked, &identity, (DAYS, SystemClock.now()))?;
        tracing::info!(%identity, "issued a certificate");
        Ok(IssuedCertificate { certificate, authorities: issuer.authority.trusted().to_owned() })
    }
}

fn bearer(headers: &HeaderMap) -> Result<&str> {
    let shown = headers.get(AUTHORIZATION).and_then(|shown| shown.to_str().ok()?.strip_prefix("Bearer "));
    shown.ok_or_else(|| Error::denied("request shows no token").expected("Authorization: Bearer TOKEN"))
}
