//! An extender of the Kubernetes scheduler, for clusters that can't use storage capacity tracking:
//! keeps pods away from nodes without room for their volumes, and prefers those with the most.
//!
//! A process of its own, without root and daemon, which reads claims and storage classes from the
//! API server. [`demand`], [`decide`] and [`score`] decide and do nothing else; the rest gathers
//! their input.

pub mod claims;
mod cluster;
pub mod decide;
pub mod demand;
mod fetch;
mod http;
mod metrics;
pub mod options;
pub mod score;
mod tls;
pub mod wire;

use std::future::Future;
use std::sync::Arc;

use crate::config::Config;
use crate::error::Error;
use crate::ids::Names;

pub use self::options::Options;

/// Serves until `stop` ends.
///
/// # Errors
/// An option, the configuration or a certificate is wrong, or the address can't be had.
pub async fn serve(options: &Options, stop: impl Future<Output = ()>) -> Result<(), Error> {
    let rule = options.rule()?;
    let names = Names::new(&options.driver_name);
    let config = Config::load(options.config.as_deref(), &names)?;
    let acceptor =
        options.tls_files()?.map(|(chain, key)| tls::acceptor(chain, key)).transpose()?;
    let reader = demand::Reader::new(&options.driver_name, &config);
    let source = fetch::Source::new(&options.driver_name, options.metrics_port);
    let cluster = cluster::Cluster::new(options.api_server()?, &options.service_account);
    let claims = claims::Claims::new(&options.driver_name, cluster);
    let extender =
        Arc::new(http::Extender { reader, claims, source, rule, metrics: metrics::Metrics::new() });
    let listener = http::bind(options.listen).await?;
    let address = listener.local_addr().unwrap_or(options.listen);
    let (driver, mode, tls) = (&options.driver_name, options.mode.name(), acceptor.is_some());
    tracing::info!(driver, mode, tls, %address, version = env!("CARGO_PKG_VERSION"), "serving");
    tokio::select! {
        () = http::serve(extender, listener, acceptor) => {}
        () = stop => {}
    }
    tracing::info!("ended");
    Ok(())
}
