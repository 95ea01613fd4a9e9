//! The protocol between agents, without I/O or clock: bytes, lanes and the time go in; bytes, events and a timeout come out.
//!
//! docs/protocol.md is the specification. Whoever opened the connection is its [`Requester`], the other side its [`Provider`];
//! a transport (QUIC, TCP) moves the bytes and tells the time, which counts from wherever the transport likes.
//!
//! ```text
//!             hello of the other side                 goodbye of either side           nothing is open,
//! Greeting ----------------------------> Open --------------------------> Leaving --------------------> Over
//!     |                                   |                                  |    goodbyes of both        ^
//!     +-- no hello in time, or another ---+-- violation, error, silence, ----+--- the same ---------------+
//!         version or identity                 stall, the transport breaks
//! ```
//!
//! Only an open connection takes new requests; one that is leaving serves those it has. Over is for ever: whatever was not
//! answered is told ([`Event::Ended`]), and asking for just that ([`Wanted::only`]) over another connection, or of another
//! peer, is all there is to resuming.

mod asked;
mod closed;
mod framing;
pub mod limits;
mod link;
mod message;
mod provider;
mod requester;
mod runs;
mod serving;
#[cfg(test)]
mod tests;

pub use self::closed::{Closed, Violation};
pub use self::link::{CONTROL, Transmit};
pub use self::message::{
    EndCode, Ended, ErrorCode, Find, Found, Frame, Hello, Kind, Message, Missing, Priority, Request, Survey, Wanted,
};
pub use self::provider::{Demand, Provider};
pub use self::requester::{Arrived, Event, How, Requester};
pub use self::runs::Runs;
pub use self::serving::{Asked, Grant, Supply};
