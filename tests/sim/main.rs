//! The log's protocol, explored.

#[cfg(test)]
mod actor;
#[cfg(test)]
mod book;
#[cfg(test)]
mod decide;
#[cfg(test)]
mod explore;
#[cfg(test)]
mod gate;
#[cfg(test)]
mod model;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod schedule;
#[cfg(test)]
mod schedules;
