//! Communication between agents: certificates ([`identity`]), the protocol ([`protocol`]) and its transports ([`quic`],
//! [`tcp`]; [`local`] between the processes of a node), requests to another agent's API ([`calls`]), the known agents
//! ([`peers`]), and the exchange of chunks ([`exchange`]).

mod asking;
mod byte_counters;
pub mod calls;
mod connection_error;
mod driver;
pub mod exchange;
mod gate;
mod guarded;
mod holdings;
pub mod identity;
pub mod ledger;
pub mod local;
mod log_limit;
pub mod peers;
pub mod policy;
mod policy_versions;
pub mod protocol;
pub mod quic;
pub mod tcp;
mod transport;

pub use self::byte_counters::ByteCounters;
pub(crate) use self::connection_error::not_bound;
pub use self::driver::{Client, Fetching, Received, Reply};
pub use self::gate::{Admission, Gate, GateStat, Pass};
pub use self::holdings::{Ahead, Holdings, Seat};
pub(crate) use self::log_limit::LogLimit;
pub(crate) use self::transport::GOOD_WINDOW;
pub use self::transport::{Dial, Transport};
