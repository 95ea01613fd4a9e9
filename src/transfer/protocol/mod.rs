//! The protocol between agents, without I/O or clock. Inputs are bytes, lanes and the time; outputs are bytes, events
//! and a timeout.
//!
//! docs/protocol.md is the specification. The side that opened the connection is its [`Requester`], the other side its
//! [`Provider`]; a transport (QUIC, TCP) moves the bytes and supplies the time, which may count from any origin.
//!
//! ```text
//!             hello of the other side                 goodbye of either side           nothing is open,
//! Greeting ----------------------------> Open --------------------------> Leaving --------------------> Over
//!     |                                   |                                  |    goodbyes of both        ^
//!     +-- no hello in time, or another ---+-- violation, error, silence, ----+--- the same ---------------+
//!         version or identity                 stall, the transport breaks
//! ```
//!
//! Only an open connection accepts new requests; a leaving one serves those it has. A connection that is over stays
//! over: [`Event::Ended`] lists the unanswered ordinals, and resuming means to request only these ([`Wanted::only`])
//! over another connection, or from another peer.

mod closed;
mod framing;
pub mod limits;
mod link;
mod message;
mod open_request;
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
pub use self::requester::{Arrived, Event, RequestOutcome, Requester};
pub use self::runs::Runs;
pub use self::serving::{AskedChunk, FrameRequest, Grant, OutgoingFrame};
