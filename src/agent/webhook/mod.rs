//! Webhook for Kubernetes: gives annotated pods a sidecar, and their service accounts certificates (docs/deploy.md).
//!
//! ```text
//! annotations (pods) -> inject (+ settings, affinity, gate) -> patch   pure: what a pod asks for, and what it gets
//! admission      reviews of the API server: names and sites are checked, then the pod is patched
//! certificates   a sidecar shows the token of its service account (token_review), and gets a certificate for a day
//! ```
//!
//! A pod never gets the rights of this agent: names are checked for its own service account, and its sidecar acts as that.

mod admission;
mod affinity;
mod arriving;
mod certificates;
mod config;
mod gate;
mod inject;
mod listener;
mod pod;
mod settings;
#[cfg(test)]
mod tests;
mod token_review;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::arriving::Arriving;
pub(super) use self::certificates::IssuedCertificate;
use self::certificates::Issuer;
pub use self::config::{IssuerConfig, SidecarIdentity, SidecarTemplate, WebhookConfig};
use self::listener::HttpsListener;
use super::api::serve;
use super::counts::WebhookCounts;
use super::pods::AccountRights;
use super::restart::once_released;
use super::state::AgentState;
use crate::error::Result;
use crate::transfer::identity::https_config;
use crate::transfer::not_bound;
use crate::work::blocking;

/// Path that the API server calls.
const MUTATE: &str = "/mutate";
/// Path at which sidecars fetch certificates.
pub(super) const CERTIFICATES: &str = "/v1/certificates";

/// The webhook of an agent.
#[derive(Debug)]
struct Webhook {
    agent: Arc<AgentState>,
    config: WebhookConfig,
    issuer: Option<Issuer>,
    rights: AccountRights,
    arriving: Arriving,
}

/// Listens for the API server and for sidecars, in `api`. Returns the address.
///
/// # Errors
/// Not found or damaged, for a certificate or an authority that cannot be used; conflict, for a port that is taken.
///
/// # Cancel safety
/// Safe.
pub(super) async fn begin(agent: &Arc<AgentState>, config: WebhookConfig, api: &mut JoinSet<()>) -> Result<SocketAddr> {
    let address = config.listen;
    let bind = async || TcpListener::bind(address).await.map_err(|source| not_bound(source, address));
    let listener = once_released("the port of [webhook]", bind).await?;
    let (folder, issuer) = (config.certificate.clone(), config.issuer.clone());
    let (tls, issuer) = blocking(move || Ok((https_config(&folder)?, issuer.map(Issuer::open).transpose()?))).await?;
    let trust_domain = match &config.trust_domain {
        Some(domain) => domain.clone(),
        // Service accounts of another site's cluster may have the same names.
        None => agent.credentials()?.identity().site().to_owned(),
    };
    let arriving = Arriving::default();
    let rights = AccountRights { rules: config.allow.clone(), trust_domain };
    let webhook = Arc::new(Webhook { agent: Arc::clone(agent), config, issuer, rights, arriving });
    let router = Router::new()
        .route(MUTATE, post(admission::mutate))
        .route(CERTIFICATES, post(certificates::issue))
        .layer(DefaultBodyLimit::max(admission::REVIEW_LEN_MAX))
        .with_state(webhook);
    let address = listener.local_addr().map_err(|source| not_bound(source, address))?;
    let listener = HttpsListener::new(listener, tls);
    agent.cluster.webhook.get_or_init(WebhookCounts::default);
    api.spawn(serve(listener, |address| address, router, agent.leaving.clone()));
    Ok(address)
}
