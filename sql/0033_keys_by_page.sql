-- Retention reads the keys in the order of the table's pages and goes on where it was. By this index each batch began anew; and once vacuum
-- had given room in old pages to new keys, it named most of the table.
drop index if exists waybill.idempotency_keys_age;
