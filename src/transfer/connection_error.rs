//! Errors of connections, over either transport.

use std::io;
use std::net::SocketAddr;

use quinn::ConnectionError;
use rustls::{AlertDescription, CertificateError};

use super::identity::refused;
use crate::error::{Error, ErrorKind};

/// Error of a handshake that was dropped to make room for others.
pub(super) fn displaced() -> Error {
    Error::exhausted("handshake dropped: too many connections wait for theirs")
}

/// Error of a connection that could not be made.
pub(super) fn broken(error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::TimedOut {
        return Error::unreachable("peer does not answer in time").source(error);
    }
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).cloned() {
        Some(tls) => refused(tls),
        None => Error::unreachable("peer cannot be reached").source(error),
    }
}

/// Error of a QUIC connection that could not be made.
pub(super) fn broken_quic(error: ConnectionError) -> Error {
    let tls = match &error {
        // Detected on this side: only the alert and its text are left of the cause.
        ConnectionError::TransportError(own) => alert(own.code.into()).map(found_here),
        ConnectionError::ConnectionClosed(close) => alert(close.error_code.into()).map(rustls::Error::AlertReceived),
        _ => None,
    };
    match (tls, &error) {
        (Some(tls), _) => refused(tls),
        (None, ConnectionError::TimedOut) => Error::unreachable("peer does not answer in time").source(error),
        (None, _) => Error::unreachable("peer cannot be reached").source(error),
    }
}

/// Text of the cause of a broken connection.
pub(super) fn describe(error: &io::Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.get_ref().map(|inner| inner as _);
    while let Some(inner) = cause {
        if let Some(tls) = inner.downcast_ref::<rustls::Error>() {
            return refused(tls.clone()).to_string();
        }
        if let Some(quic) = inner.downcast_ref::<ConnectionError>() {
            return broken_quic(quic.clone()).to_string();
        }
        cause = inner.source();
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "closed by the peer".to_owned(),
        _ => error.to_string(),
    }
}

/// Error for `address` on which listening failed: `address in use: cannot listen on 127.0.0.1:7071`.
pub(crate) fn not_bound(error: io::Error, address: SocketAddr) -> Error {
    let (kind, lacking, help) = match error.kind() {
        io::ErrorKind::AddrInUse => (
            ErrorKind::Conflict,
            "address in use",
            "another process listens there: choose another port, or stop that process",
        ),
        io::ErrorKind::PermissionDenied => {
            (ErrorKind::Denied, "permission denied", "choose a port above 1023, or run as a user that may listen there")
        }
        io::ErrorKind::AddrNotAvailable => {
            (ErrorKind::Other, "not an address of this machine", "`ip address` lists those of this machine")
        }
        _ => (ErrorKind::Other, "bind failed", "choose another address, and a port above 1023"),
    };
    Error::new(kind, format!("{lacking}: cannot listen on {address}")).help(help).source(error)
}

/// TLS alert in an error code of QUIC (RFC 9001, 4.8: 0x100 and the alert's number).
fn alert(code: u64) -> Option<AlertDescription> {
    u8::try_from(code.checked_sub(0x100)?).ok().map(Into::into)
}

/// Error that this side sent the alert for.
fn found_here(alert: AlertDescription) -> rustls::Error {
    match alert {
        AlertDescription::CertificateExpired => CertificateError::Expired.into(),
        AlertDescription::CertificateRevoked => CertificateError::Revoked.into(),
        AlertDescription::UnknownCA | AlertDescription::DecryptError => CertificateError::UnknownIssuer.into(),
        AlertDescription::CertificateRequired => rustls::Error::NoCertificatesPresented,
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            CertificateError::ApplicationVerificationFailure.into()
        }
        other => rustls::Error::General(format!("{other:?}")),
    }
}
