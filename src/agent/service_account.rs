//! The certificate of an agent in a pod: fetched from the webhook with the token of the pod's service account, and renewed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::{Certificate, Client, StatusCode};

use super::webhook::{CERTIFICATES, IssuedCertificate};
use crate::backoff::Backoff;
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::transfer::identity::{CertificateRequest, Credentials};
use crate::work::blocking;

/// Time for one request.
const REQUEST_MAX: Duration = Duration::from_secs(20);
/// Pauses between tries.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Time for the first one.
const OBTAIN_MAX: Duration = Duration::from_mins(2);
/// Interval of looks at the time that is left.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// Where the certificate comes from.
#[derive(Clone, Debug)]
pub struct ServiceAccountConfig {
    /// `https://HOST:PORT` of the webhook.
    pub url: String,
    /// File with the token, which the kubelet renews.
    pub token: PathBuf,
    /// File with the authorities that the webhook's certificate is from.
    pub authorities: PathBuf,
    /// Folder for the certificate.
    pub folder: PathBuf,
}

impl ServiceAccountConfig {
    /// Returns once the folder has a valid certificate.
    ///
    /// # Errors
    /// Denied, if the webhook issues none; unreachable, if it has not answered for two minutes.
    ///
    /// # Cancel safety
    /// Safe: files are replaced as a whole.
    pub(super) async fn obtain(&self) -> Result<()> {
        let (mut pauses, begun) = (PAUSES, Instant::now());
        while !self.has_valid().await {
            match self.fetch().await {
                Ok(()) => return Ok(()),
                // The container fails visibly, and its log has this error.
                Err(error) if error.kind() == ErrorKind::Denied || begun.elapsed() > OBTAIN_MAX => return Err(error),
                Err(error) => tracing::warn!("no certificate yet: {error:?}"),
            }
            tokio::time::sleep(pauses.pause()).await;
        }
        Ok(())
    }

    /// Renews the certificate of `credentials` once a third of its time is left, until dropped.
    ///
    /// # Cancel safety
    /// As [`ServiceAccountConfig::obtain`].
    pub(super) async fn renew(self, credentials: Credentials) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let certificate = credentials.certificate();
            let whole = certificate.not_after.since(certificate.not_before);
            if certificate.not_after.since(SystemClock.now()) > whole / 3 {
                continue;
            }
            if let Err(error) = self.fetch().await {
                tracing::warn!("certificate is not renewed, and valid until {}: {error:?}", certificate.not_after);
            }
        }
    }

    async fn has_valid(&self) -> bool {
        let folder = self.folder.clone();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        blocking(move || Credentials::open(&folder, clock)).await.is_ok()
    }

    /// Fetches a certificate for a new key.
    async fn fetch(&self) -> Result<()> {
        let (config, request) = (self.clone(), CertificateRequest::create()?);
        let (client, token) = blocking(move || Ok((config.client()?, read(&config.token)?))).await?;
        let unreachable = |source: reqwest::Error| Error::unreachable("webhook issued no certificate").source(source);
        let sent = client.post(format!("{}{CERTIFICATES}", self.url)).bearer_auth(token.trim());
        let answer = sent.body(request.pem().to_owned()).send().await.map_err(unreachable)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(unreachable)?;
        if !status.is_success() {
            let reason: String = String::from_utf8_lossy(&body).chars().take(500).collect();
            let refused = matches!(status, StatusCode::FORBIDDEN | StatusCode::NOT_FOUND);
            let kind = if refused { ErrorKind::Denied } else { ErrorKind::Unreachable };
            let error = Error::new(kind, "webhook issued no certificate").at(&self.url);
            return Err(error.got(format!("{status}: {reason}")));
        }
        let issued: IssuedCertificate = serde_json::from_slice(&body)
            .map_err(|source| Error::damaged("response of the webhook is malformed").source(source))?;
        let folder = self.folder.clone();
        let written = blocking(move || request.complete(&issued.certificate, &issued.authorities, &folder)).await?;
        tracing::info!(until = %written.not_after, "has a certificate of its service account");
        Ok(())
    }

    /// Trusts the authorities of the pod, and those that came with the last certificate.
    fn client(&self) -> Result<Client> {
        let mut authorities = read(&self.authorities)?;
        if let Ok(later) = read(&self.folder.join("ca.crt")) {
            authorities.push_str(&later);
        }
        let unusable =
            |source| Error::damaged("authorities are unusable").at(self.authorities.display()).source(source);
        Client::builder()
            .tls_certs_only(Certificate::from_pem_bundle(authorities.as_bytes()).map_err(unusable)?)
            .no_proxy()
            .timeout(REQUEST_MAX)
            .build()
            .map_err(unusable)
    }
}

/// Text of a small file. Blocking.
fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::io("cannot read", path, source))
}
