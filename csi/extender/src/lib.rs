//! An extender of the Kubernetes scheduler, for clusters that can't use storage capacity tracking:
//! keeps pods away from nodes without room for their volumes, and prefers those with the most.
//!
//! A process of its own, without root and daemon, which reads claims and storage classes from the
//! API server. [`demand`], [`decide`] and [`score`] decide and do nothing else; the rest gathers
//! their input.
#![forbid(unsafe_code)]

pub mod claims;
mod cluster;
pub mod decide;
pub mod demand;
pub mod error;
pub mod fetch;
mod http;
mod metrics;
pub mod options;
pub mod score;
mod tls;
pub mod wire;

use std::future::Future;

use blockd_csi_base::bytes::Bytes;

pub use self::error::Error;
pub use self::options::Options;

/// Facts of the driver's plugins, which are configured together with the extender.
#[derive(Clone, Debug)]
pub struct Plugin {
    /// The parameter of a storage class that names the device class.
    pub class_parameter: String,
    /// The class of a volume that names none.
    pub default_class: String,
    /// The size of a volume that has none.
    pub default_size: Bytes,
}

/// Serves until `stop` ends.
///
/// # Errors
/// An option or a certificate is wrong, or the address can't be had.
pub async fn serve(
    options: &Options,
    plugin: &Plugin,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let rule = options.rule()?;
    let acceptor =
        options.tls_files()?.map(|(chain, key)| tls::acceptor(chain, key)).transpose()?;
    let reader = demand::Reader::new(&options.driver_name, plugin);
    let source = fetch::Source::new(&options.driver_name, options.metrics_port);
    let cluster = cluster::Cluster::new(options.api_server()?, &options.service_account);
    let claims = claims::Claims::new(&options.driver_name, &plugin.class_parameter, cluster);
    let extender =
        http::Extender { reader, claims, source, rule, metrics: metrics::Metrics::new() };
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
