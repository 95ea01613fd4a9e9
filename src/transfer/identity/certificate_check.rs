//! Validity of a peer's certificate for as long as its connection lasts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::pki_types::{CertificateDer, UnixTime};

use super::certificate::Certificate;
use super::credentials::{Loaded, POLL_INTERVAL};
use super::{Credentials, refused};
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// Role of the peer in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The peer is the server.
    Server,
    /// The peer is the client.
    Client,
}

/// Repeated check of the certificate of a connected peer. Clones share it.
#[derive(Clone, Debug)]
pub struct CertificateCheck(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    credentials: Credentials,
    side: Side,
    peer: CertificateDer<'static>,
    intermediates: Vec<CertificateDer<'static>>,
    /// Earliest expiry of the certificates.
    until: Timestamp,
    /// Set once the end was logged.
    logged: AtomicBool,
}

impl CertificateCheck {
    /// Check of a peer that has shown `certificates`, its own first.
    ///
    /// # Errors
    /// Denied, if there are none; damaged, if one is malformed.
    pub fn of(credentials: &Credentials, certificates: Option<&[CertificateDer<'_>]>, side: Side) -> Result<Self> {
        let shown = certificates.and_then(<[_]>::split_first);
        let (peer, rest) = shown.ok_or_else(|| Error::denied("peer has shown no certificate"))?;
        let mut until = Certificate::read(peer)?.not_after;
        for certificate in rest {
            until = until.min(Certificate::read(certificate)?.not_after);
        }
        Ok(Self(Arc::new(Inner {
            credentials: credentials.clone(),
            side,
            peer: peer.clone().into_owned(),
            intermediates: rest.iter().map(|certificate| certificate.clone().into_owned()).collect(),
            until,
            logged: AtomicBool::new(false),
        })))
    }

    /// Waits until the peer is no longer trusted: its certificate was revoked or has expired, or its authority was
    /// removed. Returns the reason.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ended(&self) -> rustls::Error {
        let mut verified: Option<Arc<Loaded>> = None;
        loop {
            if let Err(error) = self.check(&mut verified) {
                if !self.0.logged.swap(true, Ordering::AcqRel) {
                    let peer = Certificate::read(&self.0.peer).ok().and_then(|certificate| certificate.identity);
                    let peer = peer.map(|identity| identity.path());
                    tracing::warn!(peer = peer.as_deref(), "connection closed: {}", refused(error.clone()));
                }
                return error;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Verifies again if anything changed since `verified`.
    fn check(&self, verified: &mut Option<Arc<Loaded>>) -> Result<(), rustls::Error> {
        let current = self.0.credentials.current();
        let now = self.0.credentials.clock().now();
        if now <= self.0.until && verified.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
            return Ok(());
        }
        let (peer, intermediates) = (&self.0.peer, &self.0.intermediates);
        let time = UnixTime::since_unix_epoch(now.since(Timestamp(0)));
        match self.0.side {
            Side::Server => current.verify_server(peer, intermediates, time)?,
            Side::Client => current.verify_client(peer, intermediates, time)?,
        };
        *verified = Some(current);
        Ok(())
    }
}
