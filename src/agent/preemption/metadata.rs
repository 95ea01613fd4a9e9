//! Client of a cloud's metadata service: plain HTTP at a link-local address.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::error::{Error, Result};

/// Address, the same in all three clouds (RFC 3927;
/// <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html>,
/// <https://cloud.google.com/compute/docs/metadata/querying-metadata>,
/// <https://learn.microsoft.com/en-us/azure/virtual-machines/instance-metadata-service>).
const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Timeout of a request; the service runs on the machine's own host.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Limit of a response, in bytes.
const ANSWER_LEN_MAX: usize = 64 << 10;

/// A metadata service.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metadata(pub(super) SocketAddr);

impl Metadata {
    pub(super) fn of_this_machine() -> Self {
        Self(SocketAddr::from((ADDRESS, 80)))
    }

    /// Status and text of the response.
    ///
    /// # Errors
    /// Unreachable, if it does not answer in time.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<(StatusCode, String)> {
        let failed = || Error::unreachable("metadata service does not answer").at(self.0);
        let asked = async {
            let stream = TcpStream::connect(self.0).await.map_err(|source| failed().source(source))?;
            let (mut sender, connection) =
                http1::handshake(TokioIo::new(stream)).await.map_err(|source| failed().source(source))?;
            // The connection ends when the sender and the body are dropped.
            tokio::spawn(connection);
            let mut request = Request::builder().method(method).uri(path).header(header::HOST, self.0.ip().to_string());
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(Empty::<Bytes>::new()).map_err(|source| failed().source(source))?;
            let response = sender.send_request(request).await.map_err(|source| failed().source(source))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_LEN_MAX).collect().await;
            let body = body.map_err(|source| failed().source(source))?.to_bytes();
            Ok((status, String::from_utf8_lossy(&body).into_owned()))
        };
        timeout(ANSWER_WITHIN, asked).await.unwrap_or_else(|_| Err(failed()))
    }
}

/// Error for an unexpected status.
pub(super) fn unexpected(path: &str, status: StatusCode) -> Error {
    Error::unreachable("metadata service returned an error").at(path).got(status)
}
