//! `TokenReview`: whose token is it? Only the API server knows
//! (<https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-review-v1/>).

use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Certificate, Client, Url};
use serde::Deserialize;
use serde_json::json;

use super::config::ServiceAccount;
use super::inject::AUDIENCE;
use crate::error::{Error, Result};

/// Time for a review.
const REVIEW_MAX: Duration = Duration::from_secs(10);
/// Bytes of a token, at most.
const TOKEN_LEN_MAX: usize = 16 << 10;

/// Asks the API server about tokens, as the service account of this pod.
#[derive(Debug)]
pub(super) struct TokenReviewer {
    client: Client,
    url: Url,
    /// Folder of this pod's own token, which the kubelet renews.
    account: PathBuf,
}

#[derive(Debug, Deserialize)]
struct TokenReview {
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    authenticated: bool,
    user: User,
    audiences: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
}

impl TokenReviewer {
    /// Uses what the kubelet gives to a pod: the address of the API server, and in `account` a token and the authority
    /// (<https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/>). Blocking.
    ///
    /// # Errors
    /// Usage, if this is no pod; the file system's.
    pub(super) fn open(account: PathBuf) -> Result<Self> {
        let variable = |name: &'static str| {
            std::env::var(name).map_err(|_| {
                Error::usage("[webhook.issuer] needs the API server of Kubernetes")
                    .expected(format!("{name}, which every pod has"))
            })
        };
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let url = format!("https://{host}:{port}/apis/authentication.k8s.io/v1/tokenreviews");
        let url =
            url.parse().map_err(|source| Error::usage("address of the API server is malformed").source(source))?;
        let path = account.join("ca.crt");
        let authority = std::fs::read(&path).map_err(|source| {
            Error::io("cannot read the authority of the API server", &path, source)
                .help("set automountServiceAccountToken for this pod")
        })?;
        let unusable =
            |source| Error::damaged("authority of the API server is unusable").at(path.display()).source(source);
        let client = Client::builder()
            .tls_certs_only(Certificate::from_pem_bundle(&authority).map_err(unusable)?)
            .no_proxy()
            .timeout(REVIEW_MAX)
            .build()
            .map_err(unusable)?;
        Ok(Self { client, url, account })
    }

    /// The service account that `token` is of, if it was made for Towline.
    ///
    /// # Errors
    /// Denied, for any other token; unreachable, if the API server does not say.
    ///
    /// # Cancel safety
    /// Safe: a review changes nothing.
    pub(super) async fn account_of(&self, token: &str) -> Result<ServiceAccount> {
        if token.len() > TOKEN_LEN_MAX {
            return Err(Error::denied("token is too long"));
        }
        let path = self.account.join("token");
        let own = tokio::fs::read_to_string(&path).await;
        let own = own.map_err(|source| Error::io("cannot read the token of this pod", &path, source))?;
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": { "token": token, "audiences": [AUDIENCE] },
        });
        let unreachable = |source: reqwest::Error| Error::unreachable("API server reviewed no token").source(source);
        let sent = self.client.post(self.url.clone()).bearer_auth(own.trim());
        let sent = sent.header("content-type", "application/json").body(review.to_string()).send().await;
        let answer = sent.map_err(unreachable)?;
        if !answer.status().is_success() {
            return Err(Error::unreachable("API server reviewed no token")
                .got(answer.status())
                .help("the service account of this pod may create tokenreviews: see the chart's ClusterRole"));
        }
        let answer = answer.bytes().await.map_err(unreachable)?;
        let TokenReview { status } = serde_json::from_slice(&answer)
            .map_err(|source| Error::unreachable("API server sent no TokenReview").source(source))?;
        // An API server that knows no audiences leaves them out, and any token of the pod would do.
        if !status.authenticated || !status.audiences.iter().any(|audience| audience == AUDIENCE) {
            return Err(Error::denied("token is not valid for the audience `towline`"));
        }
        ServiceAccount::of_user(&status.user.username)
    }
}
