//! Passing a file descriptor over a Unix socket (<https://man7.org/linux/man-pages/man7/unix.7.html>, `SCM_RIGHTS`).
//!
//! The receiver sends [`READY`] once it reads the socket itself; the sender answers with one byte that carries the descriptor. The
//! connection then stays open for as long as the receiver uses the memory.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::trees::Lease;

/// Byte of a receiver that is ready for the descriptor. A descriptor that arrives earlier would be lost: the HTTP client reads
/// ahead.
const READY: u8 = b'r';
/// Byte that carries the descriptor.
const MEMORY: u8 = b'm';
/// Time that the other side has to take its turn.
const TURN: Duration = Duration::from_secs(10);

/// Passes the memory of `lease` to the process at `stream`, and holds the lease until the process disconnects.
///
/// # Errors
/// Errors of the socket; timed out, if the process is never ready.
///
/// # Cancel safety
/// Safe: the lease ends.
pub(in crate::agent) async fn pass(stream: &UnixStream, lease: &Lease) -> io::Result<()> {
    let ready = timeout(TURN, read_byte(stream)).await.map_err(io::Error::from)??;
    if ready != Some(READY) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let memory = lease.tree().memory();
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [memory.as_fd()];
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(sendmsg(stream, &[IoSlice::new(&[MEMORY])], &mut control, SendFlags::NOSIGNAL)?)
    };
    timeout(TURN, stream.async_io(Interest::WRITABLE, send)).await.map_err(io::Error::from)??;
    // Whatever the process sends is of no interest; it says nothing until it disconnects.
    while read_byte(stream).await?.is_some() {}
    Ok(())
}

/// Receives the descriptor that [`pass`] sends.
///
/// # Errors
/// Errors of the socket; unexpected end, if the agent refuses; timed out, if it says nothing.
///
/// # Cancel safety
/// A descriptor that arrived is closed.
pub(super) async fn receive(stream: &UnixStream) -> io::Result<OwnedFd> {
    let write = || stream.try_write(&[READY]);
    timeout(TURN, stream.async_io(Interest::WRITABLE, write)).await.map_err(io::Error::from)??;
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let (mut control, mut byte) = (RecvAncillaryBuffer::new(&mut space), [0]);
        let read = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptor = descriptors.flatten().next();
        match descriptor {
            Some(descriptor) if read.bytes == 1 && byte == [MEMORY] => Ok(descriptor),
            _ if read.bytes == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    };
    timeout(TURN, stream.async_io(Interest::READABLE, receive)).await.map_err(io::Error::from)?
}

/// The next byte; none at the end.
async fn read_byte(stream: &UnixStream) -> io::Result<Option<u8>> {
    let mut byte = [0];
    let read = stream.async_io(Interest::READABLE, || stream.try_read(&mut byte)).await?;
    Ok((read > 0).then_some(byte[0]))
}
