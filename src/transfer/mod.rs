//! Communication between agents: certificates ([`identity`]), the protocol ([`protocol`]) and its transports ([`quic`],
//! [`tcp`]; [`local`] between the processes of a node), requests to another agent's API ([`calls`]), the known agents
//! ([`peers`]), and the exchange of chunks ([`exchange`]).

mod byte_counters;
pub mod calls;
mod connection_error;
mod driver;
pub mod exchange;
mod frame_request;
mod gate;
mod guarded;
pub mod identity;
pub mod inventories;
pub mod ledger;
mod link_rates;
mod listeners;
pub mod local;
mod outcomes;
pub mod peers;
pub mod policy;
mod policy_versions;
pub mod protocol;
pub mod quic;
mod read_ahead;
mod served_chunks;
pub mod tcp;
mod transport;
pub mod usage;

pub use self::byte_counters::ByteCounters;
pub(crate) use self::connection_error::not_bound;
pub use self::driver::{Client, Fetching, Received, Reply};
pub use self::gate::{Admission, ConnectionPermit, Gate, GateStat};
pub use self::listeners::listen;
pub use self::read_ahead::{ReadAhead, ReadAheadShare};
pub use self::served_chunks::ServedChunks;
pub(crate) use self::transport::GOOD_WINDOW;
pub use self::transport::{Dial, Transport};
