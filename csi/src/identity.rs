//! The identity service: the plugin's name, its capabilities, and its readiness.

use std::sync::Arc;

use blockd_api::v1;
use tonic::{Request, Response, Status};

use crate::plugin::{Call, Plugin};
use crate::proto;
use crate::proto::identity_server::Identity;
use crate::proto::plugin_capability::{Service as OfService, Type, VolumeExpansion};
use crate::proto::plugin_capability::{service, volume_expansion};

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
}

impl Service {
    /// For this plugin.
    #[must_use]
    pub const fn new(plugin: Arc<Plugin>) -> Self {
        Self { plugin }
    }
}

/// The same for every process, whichever services it has: by the specification, this is about the
/// plugin as a whole.
fn capabilities() -> Vec<proto::PluginCapability> {
    let of = |kind: service::Type| Type::Service(OfService { r#type: kind.into() });
    let online = volume_expansion::Type::Online.into();
    [
        of(service::Type::ControllerService),
        of(service::Type::VolumeAccessibilityConstraints),
        of(service::Type::GroupControllerService),
        of(service::Type::SnapshotMetadataService),
        Type::VolumeExpansion(VolumeExpansion { r#type: online }),
    ]
    .map(|kind| proto::PluginCapability { r#type: Some(kind) })
    .to_vec()
}

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        request: Request<proto::GetPluginInfoRequest>,
    ) -> Result<Response<proto::GetPluginInfoResponse>, Status> {
        let call = Call::new("GetPluginInfo", &request, "").quiet();
        let answer = proto::GetPluginInfoResponse {
            name: self.plugin.settings.driver.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<proto::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<proto::GetPluginCapabilitiesResponse>, Status> {
        let call = Call::new("GetPluginCapabilities", &request, "").quiet();
        let answer = proto::GetPluginCapabilitiesResponse { capabilities: capabilities() };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn probe(
        &self,
        request: Request<proto::ProbeRequest>,
    ) -> Result<Response<proto::ProbeResponse>, Status> {
        let call = Call::new("Probe", &request, "").quiet();
        let plugin = Arc::clone(&self.plugin);
        let work = async move {
            // An unreachable daemon is not a fault of the plugin that a restart would repair.
            let answer = plugin.daemon.version(v1::VersionRequest {}).await;
            let ready = answer.is_ok_and(|version| version.ready);
            Ok(proto::ProbeResponse { ready: Some(ready) })
        };
        self.plugin.run(call, work).await
    }
}
