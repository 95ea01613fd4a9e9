//! Token reviews: the API server says which service account a token is of
//! (<https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-review-v1/>).

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use reqwest::{Certificate, Client, Url};
use serde::Deserialize;
use serde_json::json;

use super::inject::AUDIENCE;
use crate::agent::pods::ServiceAccount;
use crate::error::{Error, Result};
use crate::toml_text::OneOrSeveral;
use crate::tree::FileStamp;

/// Authority of the API server, beside the token.
const AUTHORITY: &str = "ca.crt";
/// Time for a review.
const REVIEW_MAX: Duration = Duration::from_secs(10);
/// Bytes of a token, at most.
const TOKEN_LEN_MAX: usize = 16 << 10;

/// Reviews at a time: of all addresses, and of one. Further requests are refused, and tried again by their sidecars.
const REVIEWS_MAX: usize = 32;
const REVIEWS_EACH: usize = 4;

/// Asks the API server about tokens, as the service account of this pod.
#[derive(Debug)]
pub(super) struct TokenReviewer {
    current: Mutex<(FileStamp, Client)>,
    url: Url,
    /// Folder of this pod's own token and the authority of the API server, which the kubelet renews.
    account: PathBuf,
    /// Addresses whose tokens are reviewed.
    under_way: Mutex<Vec<IpAddr>>,
}

/// Place of a review, until dropped.
struct Place<'a>(&'a Mutex<Vec<IpAddr>>, IpAddr);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut under_way = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = under_way.iter().position(|from| *from == self.1) {
            under_way.swap_remove(at);
        }
    }
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
        let current = Mutex::new((FileStamp::at(&account.join(AUTHORITY)), client(&account)?));
        Ok(Self { current, url, account, under_way: Mutex::default() })
    }

    /// The service account that `token` is of, if it was made for Towline.
    ///
    /// # Errors
    /// Denied, for any other token; exhausted, if too many are reviewed; unreachable, if the API server does not say.
    ///
    /// # Cancel safety
    /// Safe: a review changes nothing.
    pub(super) async fn account_of(&self, from: IpAddr, token: &str) -> Result<ServiceAccount> {
        // The API server refuses such tokens, so it need not be asked.
        if token.len() > TOKEN_LEN_MAX || !says_audience(token) {
            return Err(not_for_us());
        }
        let _place = self.place(from)?;
        let path = self.account.join("token");
        let own = tokio::fs::read_to_string(&path).await;
        let own = own.map_err(|source| Error::io("cannot read the token of this pod", &path, source))?;
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": { "token": token, "audiences": [AUDIENCE] },
        });
        let unreachable = |source: reqwest::Error| Error::unreachable("API server reviewed no token").source(source);
        let sent = self.client()?.post(self.url.clone()).bearer_auth(own.trim());
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
            return Err(not_for_us());
        }
        ServiceAccount::of_user(&status.user.username)
    }

    fn place(&self, from: IpAddr) -> Result<Place<'_>> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let own = under_way.iter().filter(|other| **other == from).count();
        if own >= REVIEWS_EACH || under_way.len() >= REVIEWS_MAX {
            return Err(Error::exhausted("too many requests for certificates at once"));
        }
        under_way.push(from);
        Ok(Place(&self.under_way, from))
    }

    /// The client for the authority in the current file.
    fn client(&self) -> Result<Client> {
        let stamp = FileStamp::at(&self.account.join(AUTHORITY));
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != stamp {
            *current = (stamp, client(&self.account)?);
        }
        Ok(current.1.clone())
    }
}

fn client(account: &Path) -> Result<Client> {
    let path = account.join(AUTHORITY);
    let authority = std::fs::read(&path).map_err(|source| {
        Error::io("cannot read the authority of the API server", &path, source)
            .help("set automountServiceAccountToken for this pod")
    })?;
    let unusable = |source| Error::damaged("authority of the API server is unusable").at(path.display()).source(source);
    Client::builder()
        .tls_certs_only(Certificate::from_pem_bundle(&authority).map_err(unusable)?)
        .no_proxy()
        .timeout(REVIEW_MAX)
        .build()
        .map_err(unusable)
}

fn not_for_us() -> Error {
    Error::denied("token is not valid for the audience `towline`")
}

/// True if the claims of `token` (<https://datatracker.ietf.org/doc/html/rfc7519#section-4.1.3>) have the audience; whether they are
/// true is for the API server to say.
fn says_audience(token: &str) -> bool {
    #[derive(Deserialize)]
    struct Claims {
        aud: OneOrSeveral,
    }
    let claims = token.split('.').nth(1).and_then(|claims| BASE64_URL_SAFE_NO_PAD.decode(claims).ok());
    let claims = claims.and_then(|claims| serde_json::from_slice::<Claims>(&claims).ok());
    claims.is_some_and(|claims| claims.aud.list().iter().any(|audience| audience == AUDIENCE))
}
